//! Sinks: the schema that they need, and whether a database can be one.

mod check;
mod postgres;
mod report;
mod schema;
mod sqlite;
mod trial;

pub(crate) use check::check;
pub(crate) use schema::print as schema;

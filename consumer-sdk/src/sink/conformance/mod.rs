//! Conformance kit: what every fenced sink must hold, driven against a real one.

mod grants;

pub use grants::grant;

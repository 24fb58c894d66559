//! Addresses of databases, which may hold a password: how they are given, and that they are not shown.

use std::convert::Infallible;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::str::FromStr;

use crate::output::complain;
use crate::{Failure, exit};

/// Longest file that an address is read from, in bytes.
const FILE_BYTES_MAX: u64 = 8 * 1024;

/// Address of a database. What it holds is a secret: `Debug` shows none of it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address(String);

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Address(..)")
    }
}

impl FromStr for Address {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl Address {
    /// The address itself, for the driver alone.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }

    /// Whether it seems to hold a password. Rather once too often: a password may be of any characters.
    fn has_password(&self) -> bool {
        let Some((scheme, rest)) = self.0.split_once("://") else { return false };
        let in_user = rest.rsplit_once('@').is_some_and(|(user, _host)| user.contains(':'));
        scheme != "sqlite" && (in_user || rest.contains("password="))
    }
}

/// The ways to give one address, by their names.
pub(crate) struct Ways {
    /// The argument that others on the machine can read.
    pub(crate) argument: &'static str,
    /// The argument that names a file.
    pub(crate) file: &'static str,
    /// The environment variable. Not one of clap's, whose help would show what it holds.
    pub(crate) variable: &'static str,
}

impl Ways {
    /// Finds the address: what the command line says, else the environment. Warns of a password that others can read.
    pub(crate) fn find(
        &self,
        given: Option<&Address>,
        file: Option<&Path>,
    ) -> Result<Option<Address>, Failure> {
        if let Some(path) = file {
            return self.read(path).map(Some);
        }
        if let Some(address) = given {
            if address.has_password() {
                complain(format_args!(
                    "warning: the password in {} is shown by `ps` to everyone on this machine\n\
                     next: give the address by {} FILE or in {}",
                    self.argument, self.file, self.variable
                ));
            }
            return Ok(Some(address.clone()));
        }
        match std::env::var(self.variable) {
            Ok(text) if text.trim().is_empty() => {
                Err(usage(format!("{} is empty: set it to an address, or unset it", self.variable)))
            }
            Ok(text) => Ok(Some(Address(text.trim().to_owned()))),
            Err(std::env::VarError::NotPresent) => Ok(None),
            // The error's own text would show the value.
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(usage(format!("{} is not of UTF-8", self.variable)))
            }
        }
    }

    fn read(&self, path: &Path) -> Result<Address, Failure> {
        let at = format!("{} {}", self.file, path.display());
        let mut text = String::new();
        let read = File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
        read.map_err(|error| usage(format!("{at}: {error}")))?;
        let is_short = u64::try_from(text.len()).is_ok_and(|length| length <= FILE_BYTES_MAX);
        match text.trim() {
            address if !address.is_empty() && !address.contains('\n') && is_short => {
                Ok(Address(address.to_owned()))
            }
            _ => Err(usage(format!("{at}: write the address into it, on one line"))),
        }
    }
}

fn usage(message: String) -> Failure {
    Failure { message, exit: exit::USAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_found_wherever_an_address_may_have_one() {
        for (text, expected) in [
            ("postgres://ann:pw@host/data", true),
            ("postgres://ann:p/w@x@host/data", true),
            ("postgres://host/data?user=ann&password=pw", true),
            ("redis://:pw@host:6379", true),
            ("postgres://ann@host:5432/data", false),
            ("postgres://host:5432/data", false),
            ("sqlite:/data/a:b@c.db", false),
            ("sqlite:///data/a:b@c.db", false),
            ("kafka://a:9092,b:9092/topic", false),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.has_password(), expected, "{text}");
            assert_eq!(format!("{address:?}"), "Address(..)");
        }
    }
}

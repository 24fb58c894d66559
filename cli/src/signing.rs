//! The key that a node signs grants with.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use tenure_token::SigningKey;

use crate::args::SigningKeyArgs;
use crate::output::line;
use crate::{Failure, exit};

pub(crate) fn run(args: &SigningKeyArgs) -> Result<(), Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure {
        message: format!("{}: {error}", args.file.display()),
        exit: exit::FAILED,
    };
    let key = match std::fs::read_to_string(&args.file) {
        Ok(text) => SigningKey::parse(&text).map_err(|error| failed(&error))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make(&args.file).map_err(|error| failed(&error))?
        }
        Err(error) => return Err(failed(&error)),
    };
    line(key.public());
    Ok(())
}

/// Makes a key file that is nobody else's to read, and never replaces one.
fn make(path: &Path) -> io::Result<SigningKey> {
    let key = SigningKey::from_secret(&rand::random());
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(key.to_file_text().as_bytes())?;
    file.sync_all()?;
    Ok(key)
}

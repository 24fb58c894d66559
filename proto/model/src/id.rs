//! Names that people and processes give.

use crate::limits::NAME_BYTES_MAX;

/// What is wrong with a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The name is empty.
    #[error("{what} is empty: give it a name of 1 to {NAME_BYTES_MAX} bytes")]
    Empty {
        /// Kind of name.
        what: &'static str,
    },
    /// The name is longer than [`NAME_BYTES_MAX`].
    #[error("{what} has {size_bytes} bytes, at most {NAME_BYTES_MAX} are allowed")]
    TooLong {
        /// Kind of name.
        what: &'static str,
        /// Length found, in bytes.
        size_bytes: usize,
    },
    /// The name has a character outside `A-Z a-z 0-9 . _ - :`.
    #[error(
        "{what} has the character {found:?} at byte {at}: use letters, digits, '.', '_', '-' and ':'"
    )]
    Character {
        /// Kind of name.
        what: &'static str,
        /// The offending character.
        found: char,
        /// Its byte position.
        at: usize,
    },
}

pub(crate) fn check_name(what: &'static str, text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty { what });
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(NameError::TooLong { what, size_bytes: text.len() });
    }
    let odd = text
        .char_indices()
        .find(|(_, c)| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':')));
    match odd {
        Some((at, found)) => Err(NameError::Character { what, found, at }),
        None => Ok(()),
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        ///
        /// 1 to 249 bytes of ASCII letters, digits, `.`, `_`, `-` and `:`. Cheap to clone.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(std::sync::Arc<str>);

        impl $type {
            /// Checks `text` and makes a name of it.
            ///
            /// # Errors
            ///
            /// [`NameError`](crate::NameError) when it is empty, too long or has an odd character.
            pub fn new(text: &str) -> Result<Self, $crate::NameError> {
                $crate::id::check_name($what, text)?;
                Ok(Self(text.into()))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::NameError;
            fn from_str(text: &str) -> Result<Self, $crate::NameError> {
                Self::new(text)
            }
        }
    };
}
pub(crate) use name;

name!(
    /// Name of a group: consumers that share topics.
    GroupId,
    "group"
);
name!(
    /// Name of one running consumer, picked by the SDK; never used twice.
    MemberId,
    "member"
);
name!(
    /// Name that makes a member static: it survives the process.
    InstanceId,
    "instance id"
);
name!(
    /// Name of a label of a member, such as `rack`.
    LabelName,
    "label"
);
name!(
    /// Name of one request of an operator. The same id is the same request.
    RequestId,
    "request id"
);

//! Signed grant tokens.
//!
//! A token says that a coordinator granted one resource under one epoch to one member. The coordinator signs it, the
//! member carries it, and a receiving service verifies it with the coordinator's public key alone, without asking
//! anybody. A service that demands a token before it raises a fence cannot be made to shut an owner out by someone who
//! only knows the resource's name: an epoch that was never granted has no token.
//!
//! A token never runs out. It proves a grant, not that the grant still counts: an older epoch is refused by the fence.
//! The time in it is for audit and is compared with nothing.
//!
//! | Part | Form |
//! |---|---|
//! | token | `BODY.SIGNATURE`, both URL-safe base64 without padding, at most [`TOKEN_BYTES_MAX`] |
//! | body | lines: `tenure-grant-1`, key id, cluster, resource, epoch, member, issued at (Unix ms) |
//! | signature | Ed25519 over the body's bytes |

#![warn(missing_docs)]

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, Signer as _};
use tenure_model::{Epoch, MemberId};

/// Longest token that is looked at, in bytes.
pub const TOKEN_BYTES_MAX: usize = 4096;

/// First line of a body: its form and version.
const FORM: &str = "tenure-grant-1";

/// First word of a key file.
const KEY_FORM: &str = "tenure-signing-key-1";

/// First word of a public key's text.
const PUBLIC_FORM: &str = "ed25519:";

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// Cluster whose coordinator granted.
    pub cluster: String,
    /// Name of the fence: `group/topic id/partition`.
    pub resource: String,
    /// Epoch of the grant.
    pub epoch: Epoch,
    /// Holder.
    pub member: MemberId,
    /// When it was signed, in milliseconds since 1970 by the signer's clock. For audit; compared with nothing.
    pub issued_at_unix_ms: u64,
}

/// Names a key: the first eight bytes of the public key, in hexadecimal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(String);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Text that is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not a key file's text.
    #[error("not a signing key: expected `tenure-signing-key-1` and 32 bytes in URL-safe base64")]
    Signing,
    /// Not a public key's text.
    #[error("not a public key: expected `ed25519:` and 32 bytes in URL-safe base64")]
    Public,
}

/// Private key of a coordinator.
pub struct SigningKey {
    key: ed25519_dalek::SigningKey,
    id: KeyId,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("id", &self.id).finish_non_exhaustive()
    }
}

impl SigningKey {
    /// Makes a key of 32 bytes that nobody can guess.
    #[must_use]
    pub fn from_secret(secret: &[u8; 32]) -> Self {
        let key = ed25519_dalek::SigningKey::from_bytes(secret);
        let id = key_id(&key.verifying_key());
        Self { key, id }
    }

    /// Reads the text of a key file.
    ///
    /// # Errors
    ///
    /// [`KeyError::Signing`].
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let secret = text.trim().strip_prefix(KEY_FORM).ok_or(KeyError::Signing)?;
        let secret = bytes_32(secret.trim()).ok_or(KeyError::Signing)?;
        Ok(Self::from_secret(&secret))
    }

    /// Text of the key file. Secret.
    #[must_use]
    pub fn to_file_text(&self) -> String {
        format!("{KEY_FORM} {}\n", URL_SAFE_NO_PAD.encode(self.key.to_bytes()))
    }

    /// What receivers verify with.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey { key: self.key.verifying_key(), id: self.id.clone() }
    }

    /// Signs a grant. The same claims give the same token.
    #[must_use]
    pub fn sign(&self, claims: &Claims) -> String {
        let Claims { cluster, resource, epoch, member, issued_at_unix_ms } = claims;
        let epoch = epoch.get();
        let body = format!(
            "{FORM}\n{}\n{cluster}\n{resource}\n{epoch}\n{member}\n{issued_at_unix_ms}",
            self.id
        );
        let signature = self.key.sign(body.as_bytes());
        format!(
            "{}.{}",
            URL_SAFE_NO_PAD.encode(&body),
            URL_SAFE_NO_PAD.encode(signature.to_bytes())
        )
    }
}

/// Public key of a coordinator. Its text is `ed25519:` and 43 characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    key: ed25519_dalek::VerifyingKey,
    id: KeyId,
}

impl PublicKey {
    /// Reads a public key's text.
    ///
    /// # Errors
    ///
    /// [`KeyError::Public`].
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let bytes = text.trim().strip_prefix(PUBLIC_FORM).and_then(bytes_32);
        let key = ed25519_dalek::VerifyingKey::from_bytes(&bytes.ok_or(KeyError::Public)?);
        let key = key.map_err(|_damaged| KeyError::Public)?;
        Ok(Self { id: key_id(&key), key })
    }

    /// Names the key in tokens and logs.
    #[must_use]
    pub const fn id(&self) -> &KeyId {
        &self.id
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC_FORM}{}", URL_SAFE_NO_PAD.encode(self.key.as_bytes()))
    }
}

/// Why a token is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Not of the form of a token.
    #[error("the token is malformed")]
    Malformed,
    /// Signed with a key that the receiver does not know.
    #[error("the token is signed with a key that is not known here")]
    UnknownKey,
    /// The signature does not fit the body.
    #[error("the token's signature does not fit")]
    Forged,
    /// Signed for something else than what it came with.
    #[error("the token is for another {what}")]
    Foreign {
        /// What differs.
        what: &'static str,
    },
}

/// The public keys that a receiver believes: one for each coordinator node, and the next one while keys are changed.
#[derive(Clone, Debug, Default)]
pub struct KeyRing {
    keys: Vec<PublicKey>,
    cluster: Option<String>,
}

impl KeyRing {
    /// Ring of some keys.
    #[must_use]
    pub const fn new(keys: Vec<PublicKey>) -> Self {
        Self { keys, cluster: None }
    }

    /// Believes tokens of one cluster only.
    #[must_use]
    pub fn of_cluster(mut self, cluster: impl Into<String>) -> Self {
        self.cluster = Some(cluster.into());
        self
    }

    /// Verifies a token that came with a resource and an epoch.
    ///
    /// # Errors
    ///
    /// [`TokenError`].
    pub fn verify(&self, token: &str, resource: &str, epoch: Epoch) -> Result<Claims, TokenError> {
        let claims = self.open(token)?;
        let cluster_differs = self.cluster.as_ref().is_some_and(|known| *known != claims.cluster);
        let foreign = [
            (cluster_differs, "cluster"),
            (claims.resource != resource, "resource"),
            (claims.epoch != epoch, "epoch"),
        ];
        match foreign.into_iter().find(|(differs, _)| *differs) {
            Some((_, what)) => Err(TokenError::Foreign { what }),
            None => Ok(claims),
        }
    }

    /// Verifies the signature and reads the body.
    fn open(&self, token: &str) -> Result<Claims, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::Malformed);
        }
        let (body, signature) = token.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |text| URL_SAFE_NO_PAD.decode(text).map_err(|_damaged| TokenError::Malformed);
        let (body, signature) = (decode(body)?, decode(signature)?);
        let body = std::str::from_utf8(&body).map_err(|_damaged| TokenError::Malformed)?;
        let signature =
            Signature::from_slice(&signature).map_err(|_damaged| TokenError::Malformed)?;
        let parts: Vec<&str> = body.split('\n').collect();
        let [FORM, key_id, cluster, resource, epoch, member, issued_at] = parts[..] else {
            return Err(TokenError::Malformed);
        };
        let key = self.keys.iter().find(|key| key.id.0 == key_id).ok_or(TokenError::UnknownKey)?;
        key.key
            .verify_strict(body.as_bytes(), &signature)
            .map_err(|_differs| TokenError::Forged)?;
        let epoch = epoch.parse().ok().and_then(|value| Epoch::new(value).ok());
        Ok(Claims {
            cluster: cluster.to_owned(),
            resource: resource.to_owned(),
            epoch: epoch.ok_or(TokenError::Malformed)?,
            member: MemberId::new(member).map_err(|_damaged| TokenError::Malformed)?,
            issued_at_unix_ms: issued_at.parse().map_err(|_damaged| TokenError::Malformed)?,
        })
    }
}

fn key_id(key: &ed25519_dalek::VerifyingKey) -> KeyId {
    KeyId(key.as_bytes()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

fn bytes_32(text: &str) -> Option<[u8; 32]> {
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> Claims {
        Claims {
            cluster: "tenure".into(),
            resource: "billing/AAAAAAAAAAAAAAAAAAAAAA/3".into(),
            epoch: Epoch::new(7).unwrap(),
            member: MemberId::new("ann").unwrap(),
            issued_at_unix_ms: 1_700_000_000_000,
        }
    }

    fn key(secret: u8) -> SigningKey {
        SigningKey::from_secret(&[secret; 32])
    }

    fn verify(ring: &KeyRing, token: &str, epoch: u64) -> Result<Claims, TokenError> {
        ring.verify(token, &claims().resource, Epoch::new(epoch).unwrap())
    }

    #[test]
    fn token_is_believed_for_its_own_resource_and_epoch_alone() {
        let ring = KeyRing::new(vec![key(2).public(), key(1).public()]);
        let token = key(1).sign(&claims());
        assert_eq!(verify(&ring, &token, 7), Ok(claims()));
        assert_eq!(verify(&ring, &token, 8), Err(TokenError::Foreign { what: "epoch" }));
        let other = ring.verify(&token, "billing/AAAAAAAAAAAAAAAAAAAAAA/4", claims().epoch);
        assert_eq!(other, Err(TokenError::Foreign { what: "resource" }));
        let elsewhere = ring.of_cluster("staging");
        assert_eq!(verify(&elsewhere, &token, 7), Err(TokenError::Foreign { what: "cluster" }));
    }

    #[test]
    fn changed_body_and_unknown_key_are_refused() {
        let ring = KeyRing::new(vec![key(1).public()]);
        assert_eq!(verify(&ring, &key(2).sign(&claims()), 7), Err(TokenError::UnknownKey));
        let token = key(1).sign(&claims());
        let (body, signature) = token.split_once('.').unwrap();
        let body = String::from_utf8(URL_SAFE_NO_PAD.decode(body).unwrap()).unwrap();
        let raised = URL_SAFE_NO_PAD.encode(body.replace("\n7\n", "\n8\n"));
        let forged = format!("{raised}.{signature}");
        assert_eq!(verify(&ring, &forged, 8), Err(TokenError::Forged));
        for malformed in ["", ".", "a.b", "no dot", &"a".repeat(TOKEN_BYTES_MAX + 1)] {
            assert_eq!(verify(&ring, malformed, 7), Err(TokenError::Malformed), "{malformed}");
        }
    }

    #[test]
    fn keys_survive_their_text() {
        let kept = SigningKey::parse(&key(3).to_file_text()).unwrap();
        assert_eq!(kept.public(), key(3).public());
        assert_eq!(PublicKey::parse(&key(3).public().to_string()), Ok(key(3).public()));
        assert_eq!(PublicKey::parse("ed25519:AA"), Err(KeyError::Public));
        assert!(SigningKey::parse("ed25519:AA").is_err());
        assert!(!format!("{:?}", key(3)).contains(key(3).to_file_text().trim()));
    }
}

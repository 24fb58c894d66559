//! Signs grants as they go down a member's stream.
//!
//! A token says what the log says already, that a member was granted a partition under an epoch, so it does no harm in the
//! hands of a node that has lost leadership meanwhile. It is made in the stream's own task, neither in apply nor in the
//! driver, and said once per stream: a heartbeat's answer is not weighed down by it.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt as _};
use tenure_model::{Epoch, GroupId, MemberId};
use tenure_proto::convert;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down as DownKind;
use tenure_token::{Claims, SigningKey};

use crate::clock::wall_clock;
use crate::driver::session::Down;

/// Whose stream it is; set once the member has joined.
pub(super) type Holder = Arc<OnceLock<(GroupId, MemberId)>>;

/// The key of this node, if it has one.
#[derive(Debug)]
pub(crate) struct Signer {
    cluster: String,
    key: Option<SigningKey>,
}

impl Signer {
    pub(crate) const fn new(cluster: String, key: Option<SigningKey>) -> Self {
        Self { cluster, key }
    }

    /// The public key as receivers are given it.
    pub(super) fn public_key(&self) -> Option<String> {
        self.key.as_ref().map(|key| key.public().to_string())
    }

    /// Signs the grants of an assignment that were made after the entry `said_through`; answers the newest of them.
    fn sign(
        &self,
        assignment: &mut v1::Assignment,
        (group, member): &(GroupId, MemberId),
        said_through: u64,
    ) -> u64 {
        let Some(key) = &self.key else { return said_through };
        let issued_at_unix_ms = wall_clock().0;
        let mut newest = said_through;
        for assigned in &mut assignment.partitions {
            if assigned.handoff <= said_through {
                continue;
            }
            newest = newest.max(assigned.handoff);
            let partition = convert::partition("assigned.partition", assigned.partition.as_ref());
            let (Ok(partition), Ok(epoch)) = (partition, Epoch::new(assigned.epoch)) else {
                continue;
            };
            assigned.token = key.sign(&Claims {
                cluster: self.cluster.clone(),
                resource: format!("{group}/{}/{}", partition.topic_id, partition.index),
                epoch,
                member: member.clone(),
                issued_at_unix_ms,
            });
        }
        newest
    }
}

/// A member's stream whose grants are signed.
pub(crate) struct Signed<S> {
    inner: S,
    signer: Arc<Signer>,
    holder: Holder,
    said_through: u64,
}

impl<S> Signed<S> {
    pub(super) fn over(inner: S, signer: &Arc<Signer>) -> (Holder, Self) {
        let holder = Holder::default();
        let signer = Arc::clone(signer);
        (Arc::clone(&holder), Self { inner, signer, holder, said_through: 0 })
    }

    fn sign(&mut self, down: &mut v1::SessionDown) {
        let assignment = match &mut down.down {
            Some(DownKind::Joined(joined)) => joined.assignment.as_mut(),
            Some(DownKind::HeartbeatAnswer(answer)) => answer.assignment.as_mut(),
            Some(DownKind::Assignment(assignment)) => Some(assignment),
            Some(DownKind::ActAnswer(_) | DownKind::Ended(_)) | None => None,
        };
        if let (Some(assignment), Some(holder)) = (assignment, self.holder.get()) {
            self.said_through = self.signer.sign(assignment, holder, self.said_through);
        }
    }
}

impl<S: Stream<Item = Down> + Unpin> Stream for Signed<S> {
    type Item = Down;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Down>> {
        self.inner.poll_next_unpin(context).map(|next| {
            next.map(|down| {
                let mut down = down?;
                self.sign(&mut down);
                Ok(down)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use tenure_model::{Partition, PartitionIndex, TopicId};
    use tenure_token::KeyRing;

    use super::*;

    fn answer(version: u64, grants: &[(u32, u64)]) -> Down {
        let partitions = grants.iter().map(|(index, epoch)| v1::Assigned {
            partition: Some(convert::partition_to_wire(Partition {
                topic_id: TopicId::from_bits(0),
                index: PartitionIndex::new(*index).unwrap(),
            })),
            epoch: *epoch,
            handoff: *epoch * 10,
            ..v1::Assigned::default()
        });
        let assignment =
            Some(v1::Assignment { version, partitions: partitions.collect(), preparing: vec![] });
        let answer = v1::HeartbeatAnswer { sequence: 1, assignment, as_held: 0 };
        Ok(v1::SessionDown { down: Some(DownKind::HeartbeatAnswer(answer)) })
    }

    #[tokio::test]
    async fn each_grant_is_signed_once_per_stream() {
        let key = SigningKey::from_secret(&[7; 32]);
        let ring = KeyRing::new(vec![key.public()]);
        let signer = Arc::new(Signer::new("tenure".into(), Some(key)));
        let downs = [answer(40, &[(0, 4)]), answer(41, &[(0, 4)]), answer(50, &[(0, 4), (1, 5)])];
        let (holder, mut stream) = Signed::over(futures::stream::iter(downs), &signer);
        holder.set((GroupId::new("g").unwrap(), MemberId::new("ann").unwrap())).unwrap();
        let mut tokens = Vec::new();
        while let Some(down) = stream.next().await {
            let Some(DownKind::HeartbeatAnswer(answer)) = down.unwrap().down else { panic!() };
            let partitions = answer.assignment.unwrap().partitions;
            tokens.push(partitions.into_iter().map(|assigned| assigned.token).collect::<Vec<_>>());
        }
        assert!(!tokens[0][0].is_empty() && !tokens[2][1].is_empty(), "new grants are signed");
        assert!(
            tokens[1][0].is_empty() && tokens[2][0].is_empty(),
            "old ones are not signed again"
        );
        let resource = "g/AAAAAAAAAAAAAAAAAAAAAA/1";
        let claims = ring.verify(&tokens[2][1], resource, Epoch::new(5).unwrap()).unwrap();
        assert_eq!((claims.member.as_str(), claims.cluster.as_str()), ("ann", "tenure"));
    }
}

//! Fences in memory, for tests of a service's handlers.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use tenure_model::Epoch;
use tokio::sync::{Mutex, MutexGuard};

use crate::fence::{Answer, Change, Fence, FenceStore, Found, Raised};
use crate::refusal::Refusal;

/// Fences in memory beside the data `T` of a test, under one lock. Gone with the process. Clones share it.
#[derive(Debug)]
pub struct MemoryFences<T> {
    state: Arc<Mutex<State<T>>>,
}

#[derive(Clone, Debug, Default)]
struct State<T> {
    fences: BTreeMap<String, Fence>,
    answers: BTreeMap<(String, String), Answer>,
    data: T,
}

/// Open transaction. Dropped without a commit, it leaves everything as it was.
#[derive(Debug)]
pub struct MemoryTransaction<'t, T> {
    draft: State<T>,
    state: MutexGuard<'t, State<T>>,
}

impl<T> Clone for MemoryFences<T> {
    fn clone(&self) -> Self {
        Self { state: Arc::clone(&self.state) }
    }
}

impl<T: Clone + Default> Default for MemoryFences<T> {
    fn default() -> Self {
        Self { state: Arc::default() }
    }
}

impl<T: Clone> MemoryFences<T> {
    /// Opens a transaction; the next one waits for its end.
    pub async fn begin(&self) -> MemoryTransaction<'_, T> {
        let state = self.state.lock().await;
        MemoryTransaction { draft: state.clone(), state }
    }
}

impl<T> MemoryTransaction<'_, T> {
    /// The data.
    pub const fn data(&mut self) -> &mut T {
        &mut self.draft.data
    }

    /// Makes fences and data count, together.
    pub fn commit(mut self) {
        *self.state = self.draft;
    }
}

impl<T: Clone + Send + 'static> FenceStore for MemoryFences<T> {
    type Transaction<'t> = MemoryTransaction<'t, T>;

    fn lock<'a>(
        &'a self,
        transaction: &'a mut MemoryTransaction<'_, T>,
        resource: &'a str,
    ) -> BoxFuture<'a, Result<Option<Fence>, Refusal>> {
        let fence = transaction.draft.fences.get(resource).cloned();
        Box::pin(std::future::ready(Ok(fence)))
    }

    fn raise<'a>(
        &'a self,
        transaction: &'a mut MemoryTransaction<'_, T>,
        resource: &'a str,
        epoch: Epoch,
        holder: &'a str,
    ) -> BoxFuture<'a, Result<Raised, Refusal>> {
        let fences = &mut transaction.draft.fences;
        let known = fences.get(resource).cloned();
        let displaced = known.as_ref().map(|known| known.epoch);
        let raised = if displaced.is_some_and(|known| known >= epoch) {
            Raised::AlreadyAsHigh
        } else {
            let next_offset = known.as_ref().and_then(|known| known.next_offset);
            let sequence = known.map_or(0, |known| known.sequence);
            let holder = holder.to_owned();
            fences.insert(
                resource.to_owned(),
                Fence { epoch, holder, next_offset, sequence, displaced },
            );
            Raised::Done { displaced }
        };
        Box::pin(std::future::ready(Ok(raised)))
    }

    fn store<'a>(
        &'a self,
        transaction: &'a mut MemoryTransaction<'_, T>,
        resource: &'a str,
        fence: &'a Fence,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        transaction.draft.fences.insert(resource.to_owned(), fence.clone());
        Box::pin(std::future::ready(Ok(())))
    }

    fn recall<'a>(
        &'a self,
        transaction: &'a mut MemoryTransaction<'_, T>,
        resource: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<Option<Answer>, Refusal>> {
        let key = (resource.to_owned(), key.to_owned());
        Box::pin(std::future::ready(Ok(transaction.draft.answers.get(&key).cloned())))
    }

    fn keep<'a>(
        &'a self,
        transaction: &'a mut MemoryTransaction<'_, T>,
        resource: &'a str,
        key: &'a str,
        answer: &'a Answer,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        let key = (resource.to_owned(), key.to_owned());
        transaction.draft.answers.insert(key, answer.clone());
        Box::pin(std::future::ready(Ok(())))
    }

    fn alone(&self, change: Change) -> BoxFuture<'static, Result<Found, Refusal>> {
        let store = self.clone();
        Box::pin(async move {
            let mut transaction = store.begin().await;
            let found = change.apply(&store, &mut transaction).await?;
            transaction.commit();
            Ok(found)
        })
    }
}

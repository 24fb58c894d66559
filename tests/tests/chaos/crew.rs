//! Worker processes, and what is done to them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tenure_proto::v1;
use tenure_sdk::session::{CallError, Repeat};
use tenure_tests::cluster::{Cluster, block_on};
use tenure_tests::process::Process;

use crate::schedule::Act;

/// Longest wait for one worker's orderly end, on a busy machine.
pub(crate) const END_MAX: Duration = Duration::from_secs(30);

const CALL_MAX: Duration = Duration::from_secs(5);

/// A process that lost what it had in hand: it was stopped or killed.
#[derive(Clone, Debug)]
pub(crate) struct Hit {
    /// Name of the process: each has its own.
    pub(crate) worker: String,
    /// The coordinator's offsets just before, by partition.
    pub(crate) committed: BTreeMap<u32, u64>,
}

/// The workers of one group.
pub(crate) struct Crew<'a> {
    cluster: &'a Cluster,
    group: String,
    command: Box<dyn Fn(&str) -> Command + 'a>,
    workers: Vec<Process>,
    started: usize,
    pub(crate) hits: Vec<Hit>,
    /// Grants whose workers said that they had lost them, by partition and epoch: on a busy machine a lease may run
    /// out although nobody was stopped.
    pub(crate) lost: BTreeSet<(u32, u64)>,
}

impl<'a> Crew<'a> {
    /// Starts `count` workers; `command` makes the command of the one with a name.
    pub(crate) fn start(
        cluster: &'a Cluster,
        group: &str,
        count: usize,
        command: impl Fn(&str) -> Command + 'a,
    ) -> Self {
        let command = Box::new(command);
        let (workers, hits, lost, group) =
            (Vec::new(), Vec::new(), BTreeSet::new(), group.to_owned());
        let mut crew = Self { cluster, group, command, workers, started: 0, hits, lost };
        crew.workers = (0..count).map(|slot| crew.spawn(slot)).collect();
        crew
    }

    /// Reads what the worker says of grants that it lost.
    fn note_losses(&mut self, slot: usize) {
        let lines = self.workers[slot].lines();
        self.lost.extend(lines.iter().filter_map(|line| lost_grant(line)));
    }

    fn spawn(&mut self, slot: usize) -> Process {
        if slot < self.workers.len() {
            self.note_losses(slot);
        }
        let name = format!("worker-{slot}-{}", self.started);
        self.started += 1;
        Process::spawn(&name, &mut (self.command)(&name))
    }

    /// Acts as the schedule says; answers what it did, for people.
    pub(crate) fn follow(&mut self, schedule: &[(u64, Act)]) -> Result<String, String> {
        let start = Instant::now();
        let mut text = String::new();
        for (second, act) in schedule {
            let due = Duration::from_secs(*second).saturating_sub(start.elapsed());
            thread::sleep(due);
            text.push_str(&format!("{:.1}s {act}; ", start.elapsed().as_secs_f64()));
            self.act(*act).map_err(|error| format!("{act}: {error}\nso far: {text}"))?;
        }
        Ok(text)
    }

    fn act(&mut self, act: Act) -> Result<(), String> {
        match act {
            Act::Stop(slot) => self.stop(slot),
            Act::Wake(slot) => self.workers[slot].resume(),
            Act::Kill(slot) => self.kill(slot),
            Act::Start(slot) => self.workers[slot] = self.spawn(slot),
            Act::Restart(slot) => return self.restart(slot),
            Act::Drain(slot) => return self.drain(slot, false),
            Act::Undrain(slot) => return self.drain(slot, true),
            Act::StopAll => (0..self.workers.len()).for_each(|slot| self.stop(slot)),
            Act::WakeAll => self.workers.iter().for_each(Process::resume),
            Act::KillAll => (0..self.workers.len()).for_each(|slot| self.kill(slot)),
            Act::StartAll => {
                self.workers = (0..self.workers.len()).map(|slot| self.spawn(slot)).collect();
            }
        }
        Ok(())
    }

    fn stop(&mut self, slot: usize) {
        self.note_hit(slot);
        self.workers[slot].pause();
    }

    fn kill(&mut self, slot: usize) {
        self.note_hit(slot);
        self.workers[slot].kill();
    }

    fn note_hit(&mut self, slot: usize) {
        let worker = self.workers[slot].name().to_owned();
        self.hits.push(Hit { worker, committed: self.committed() });
    }

    /// Any end will do; one that is not clean has left a tail, such as that of a process that was still starting.
    fn restart(&mut self, slot: usize) -> Result<(), String> {
        let (worker, committed) = (self.workers[slot].name().to_owned(), self.committed());
        self.workers[slot].terminate();
        let status = self.workers[slot].wait(END_MAX);
        let status = status.ok_or_else(|| format!("{worker} does not end"))?;
        if !status.success() {
            self.hits.push(Hit { worker, committed });
        }
        self.workers[slot] = self.spawn(slot);
        Ok(())
    }

    fn end(&mut self, slot: usize) -> Result<(), String> {
        let worker = &mut self.workers[slot];
        worker.terminate();
        match worker.wait(END_MAX) {
            Some(status) if status.success() => Ok(()),
            status => Err(format!("{} ended with {status:?}:\n{}", worker.name(), worker.tail())),
        }
    }

    /// Ends all of them in an orderly way.
    pub(crate) fn end_all(&mut self) -> Result<(), String> {
        self.workers.iter().for_each(Process::terminate);
        let ended = (0..self.workers.len()).try_for_each(|slot| self.end(slot));
        (0..self.workers.len()).for_each(|slot| self.note_losses(slot));
        ended
    }

    /// A worker that has not joined yet, or not again, has nothing to be drained of.
    fn drain(&mut self, slot: usize, undrain: bool) -> Result<(), String> {
        let name = self.workers[slot].name();
        let group = self.cluster.describe(&self.group).map_err(|error| error.to_string())?;
        let Some(member) = group.members.iter().find(|member| member.client == name) else {
            return Ok(());
        };
        let request = v1::DrainRequest {
            context: Some(v1::OperatorContext {
                request_id: String::new(),
                reason: "chaos".to_owned(),
                actor: "tests".to_owned(),
                dry_run: false,
            }),
            group: self.group.clone(),
            member: member.member.clone(),
            undrain,
        };
        let drained = block_on(self.cluster.client().call(Repeat::Safe, CALL_MAX, |channel| {
            let request = request.clone();
            async move {
                let mut client = v1::operator_client::OperatorClient::new(channel);
                client.drain(request).await
            }
        }));
        match drained {
            Ok(_) => Ok(()),
            // It left or expired meanwhile.
            Err(CallError::Refused(_)) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The coordinator's offsets; none while there is no answer.
    pub(crate) fn committed(&self) -> BTreeMap<u32, u64> {
        let group = self.group.parse().expect("a unique name is a group's");
        let offsets = block_on(self.cluster.client().fetch(&group, &[], CALL_MAX));
        let committed = offsets.unwrap_or_default().into_iter();
        committed
            .filter_map(|found| Some((found.partition.index.get(), found.next_offset?.get())))
            .collect()
    }

    /// The last lines of everyone.
    pub(crate) fn output(&self) -> String {
        let tails = self.workers.iter().map(|one| format!("--- {}\n{}", one.name(), one.tail()));
        format!("{}\n{}", tails.collect::<Vec<_>>().join("\n"), self.cluster.output())
    }
}

/// Partition and epoch of a line that says that a grant was lost.
fn lost_grant(line: &str) -> Option<(u32, u64)> {
    let is_loss = line.contains("partition given back")
        && (line.contains("reason=LeaseLost") || line.contains("reason=Fenced"));
    let field = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name));
    let (partition, epoch) = (field("partition=")?, field("epoch=e")?);
    is_loss.then_some((partition.parse().ok()?, epoch.parse().ok()?))
}

//! Which steps may come next, and what each does.

use super::*;

impl Handover {
    fn is_gone(&self, guard: Gone) -> bool {
        self.gone == Some(guard)
    }

    /// The grant that a message counts for: its own, or, without the guard, the current one.
    fn named(
        &self,
        guard: Gone,
        situation: &Situation,
        index: usize,
        (owner, epoch): (usize, u64),
    ) -> (usize, u64) {
        if self.is_gone(guard) {
            situation.current(index).unwrap_or((owner, epoch))
        } else {
            (owner, epoch)
        }
    }

    fn commit(&self, s: &mut Situation, owner: usize, index: usize, epoch: u64, next: u8) -> bool {
        let named = self.named(Gone::CommitEpoch, s, index, (owner, epoch));
        let is_current = s.current(index) == Some((owner, epoch));
        let commit = OffsetCommit {
            partition: partition(index),
            epoch: Epoch::new(named.1).unwrap(),
            sequence: CommitSequence(next.into()),
            next_offset: NextOffset::new(next.into()).unwrap(),
            metadata: Vec::new(),
        };
        let command =
            CommitOffsets { group: group(), member: member(named.0), commits: vec![commit] };
        let is_taken = s.apply(&Command::CommitOffsets(command));
        if is_taken && !is_current {
            s.break_rule("a commit of an older grant is taken");
        }
        is_taken
    }

    fn release(
        &self,
        s: &mut Situation,
        owner: usize,
        index: usize,
        epoch: u64,
        next: Option<u8>,
    ) -> bool {
        let named = self.named(Gone::ReleaseEpoch, s, index, (owner, epoch));
        let named = if named.0 == owner { named } else { (owner, epoch) };
        let is_current = s.current(index) == Some((owner, epoch));
        let release = Release {
            partition: partition(index),
            epoch: Epoch::new(named.1).unwrap(),
            next_offset: next
                .filter(|_| !self.is_gone(Gone::FinalOffset))
                .map(|next| NextOffset::new(next.into()).unwrap()),
            reason: ReleaseReason::Revoked,
            error: String::new(),
        };
        let command =
            ReleasePartitions { group: group(), member: member(owner), partitions: vec![release] };
        let is_taken = s.apply(&Command::ReleasePartitions(command));
        if is_taken && !is_current {
            s.break_rule("a release of an older grant is taken");
        }
        is_taken
    }

    fn register(&self, s: &mut Situation, owner: usize, index: usize) {
        let Work::Granted { epoch } = s.works[owner][index] else { return };
        let resource = &mut s.sink[index];
        if self.fence == Fence::Epoch && epoch < resource.highest {
            s.works[owner][index] = Work::Ended { epoch };
            return;
        }
        resource.current += 1;
        resource.highest = resource.highest.max(epoch);
        s.works[owner][index] = Work::Registered { epoch, registration: resource.current };
    }

    fn verify(&self, s: &mut Situation, owner: usize, index: usize) {
        let Work::Registered { epoch, registration } = s.works[owner][index] else { return };
        let holder = s.current(index);
        let verdict = s.core.check_owner(
            &group(),
            &member(owner),
            partition(index),
            Epoch::new(epoch).unwrap(),
        );
        let is_good = match self.gone {
            Some(Gone::Verify) => true,
            Some(Gone::VerifyEpoch) => holder.is_some_and(|(holder, _)| holder == owner),
            _ => verdict.is_ok(),
        };
        if !is_good {
            s.works[owner][index] = Work::Ended { epoch };
            return;
        }
        let position = s.core_key[index].2;
        if holder == Some((owner, epoch)) && position < s.acknowledged[index] {
            s.break_rule("an owner resumes before an acknowledged offset");
        }
        s.works[owner][index] =
            Work::Running { epoch, registration, position, committed: position };
    }

    fn write(&self, s: &mut Situation, owner: usize, index: usize) {
        let Work::Running { epoch, registration, position, committed } = s.works[owner][index]
        else {
            return;
        };
        let resource = &mut s.sink[index];
        if registration != resource.current && !self.is_gone(Gone::SinkCheck) {
            s.works[owner][index] = Work::Ended { epoch };
            return;
        }
        let is_newest = epoch == resource.highest;
        resource.written = resource.written.max(position + 1);
        s.works[owner][index] =
            Work::Running { epoch, registration, position: position + 1, committed };
        if !is_newest {
            s.break_rule("the sink takes a write of an older epoch after a newer one registered");
        }
    }

    fn expire(&self, s: &mut Situation) {
        let Some((owner, term)) = s.expiry.take() else { return };
        let Ok((_, found)) = s.core.member(&group(), &member(owner)) else { return };
        let named = MemberRef { group: group(), member: member(owner), member_epoch: found.epoch };
        let term = if self.is_gone(Gone::ExpiryTerm) { s.term } else { term };
        let was_heard = s.heard[owner];
        let members = vec![named];
        if s.apply(&Command::ExpireMembers { term: Term(term.into()), members }) {
            if was_heard {
                s.break_rule("an owner that this raft leader has heard expires");
            }
            s.alive[owner] = false;
            s.install(|_| 1 - owner);
        }
    }
}

impl Model for Handover {
    type State = Situation;
    type Action = Step;

    fn init_states(&self) -> Vec<Situation> {
        vec![Situation::new()]
    }

    fn actions(&self, s: &Situation, steps: &mut Vec<Step>) {
        if s.broken.is_some() {
            return;
        }
        for partition in 0..PARTITIONS {
            if s.moves < self.moves_max && s.alive == [true; OWNERS] {
                steps.push(Step::Move { partition });
            }
            for owner in 0..OWNERS {
                let held = s.is_held(owner, partition);
                match s.works[owner][partition] {
                    Work::None | Work::Ended { .. } => {}
                    Work::Granted { .. } => steps.push(Step::Register { owner, partition }),
                    Work::Registered { .. } => steps.push(Step::Verify { owner, partition }),
                    Work::Running { position, committed, .. } => {
                        if position < self.records {
                            steps.push(Step::Write { owner, partition });
                        }
                        if committed < position {
                            steps.push(Step::Commit { owner, partition });
                        }
                    }
                }
                let had = epoch_of(s.works[owner][partition]);
                if held.is_some_and(|epoch| had.is_none_or(|had| had < epoch)) {
                    steps.push(Step::Take { owner, partition });
                }
                if s.asked_back(owner, partition).is_some() {
                    steps.push(Step::Release { owner, partition });
                    steps.push(Step::TakeBack { partition });
                }
            }
        }
        if s.late.is_some() {
            steps.push(Step::Arrive);
        }
        if !self.expires {
            return;
        }
        for owner in 0..OWNERS {
            if s.expiry.is_none() && s.alive == [true; OWNERS] && s.term == 1 {
                steps.push(Step::Due { owner });
            }
            if s.alive[owner] && !s.heard[owner] && s.expiry != Some((owner, s.term)) {
                steps.push(Step::Hear { owner });
            }
        }
        if s.expiry.is_some() {
            steps.push(Step::Expire);
        }
        if s.term == 1 {
            steps.push(Step::Elect);
        }
    }

    fn next_state(&self, before: &Situation, step: Step) -> Option<Situation> {
        let mut after = before.clone();
        let s = &mut after;
        match step {
            Step::Move { partition: index } => {
                let (owner, _) = s.current(index)?;
                s.moves += 1;
                let operator = operator(&format!("move-{}", s.moves));
                let (partition, to) = (partition(index), member(1 - owner));
                let wish = MovePartition { operator, group: group(), partition, to };
                s.apply(&Command::MovePartition(wish));
            }
            Step::Take { owner, partition } => {
                let epoch = s.is_held(owner, partition)?;
                s.works[owner][partition] = Work::Granted { epoch };
            }
            Step::Register { owner, partition } => self.register(s, owner, partition),
            Step::Verify { owner, partition } => self.verify(s, owner, partition),
            Step::Write { owner, partition } => self.write(s, owner, partition),
            Step::Commit { owner, partition } => {
                let Work::Running { epoch, registration, position, .. } = s.works[owner][partition]
                else {
                    return None;
                };
                if self.commit(s, owner, partition, epoch, position) {
                    s.acknowledged[partition] = s.acknowledged[partition].max(position);
                    s.works[owner][partition] =
                        Work::Running { epoch, registration, position, committed: position };
                    s.late.get_or_insert(Late::Commit { owner, partition, epoch, next: position });
                } else {
                    s.works[owner][partition] = Work::Ended { epoch };
                }
            }
            Step::Release { owner, partition } => {
                let work = std::mem::take(&mut s.works[owner][partition]);
                let epoch = s.asked_back(owner, partition)?;
                let next = match work {
                    Work::Running { position, epoch: own, .. } if own == epoch => Some(position),
                    Work::Running { .. }
                    | Work::None
                    | Work::Granted { .. }
                    | Work::Registered { .. }
                    | Work::Ended { .. } => None,
                };
                if self.release(s, owner, partition, epoch, next) {
                    let next = next.unwrap_or(0);
                    s.acknowledged[partition] = s.acknowledged[partition].max(next);
                    s.late.get_or_insert(Late::Release { owner, partition, epoch });
                }
            }
            Step::TakeBack { partition: index } => {
                let (_, epoch) = s.current(index)?;
                let (partition, epoch) = (partition(index), Epoch::new(epoch).unwrap());
                let grants = vec![GrantRef { group: group(), partition, epoch }];
                let term = Term(s.term.into());
                s.apply(&Command::ExpireRevocations { term, grants });
            }
            Step::Arrive => match s.late.take()? {
                Late::Commit { owner, partition, epoch, next } => {
                    self.commit(s, owner, partition, epoch, next);
                }
                Late::Release { owner, partition, epoch } => {
                    self.release(s, owner, partition, epoch, None);
                }
            },
            Step::Due { owner } => {
                s.heard[owner] = false;
                s.expiry = Some((owner, s.term));
            }
            Step::Expire => self.expire(s),
            Step::Elect => {
                s.term += 1;
                s.heard = [false; OWNERS];
            }
            Step::Hear { owner } => s.heard[owner] = true,
        }
        Some(after)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no rule is broken", |_, s: &Situation| s.broken.is_none()),
            Property::sometimes(
                "a partition goes to the other owner and back",
                |_, s: &Situation| {
                    let runs = |work: &Work, partition: usize| match work {
                        Work::Running { epoch, .. } => {
                            s.current(partition) == Some((partition, *epoch))
                                && *epoch > u64::try_from(PARTITIONS).unwrap() + 1
                        }
                        Work::None
                        | Work::Granted { .. }
                        | Work::Registered { .. }
                        | Work::Ended { .. } => false,
                    };
                    (0..PARTITIONS).any(|partition| runs(&s.works[partition][partition], partition))
                },
            ),
        ]
    }
}

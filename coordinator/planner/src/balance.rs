//! The search: keep what may stay, fill what is free, then move along shortest chains while a gap of 2 or more closes.
//!
//! Partitions that the same members may take are of one *kind*. Chains are searched over members and kinds, not over
//! partitions, so that a search costs members × kinds however many partitions there are.

use std::collections::{BTreeMap, BTreeSet, VecDeque, btree_map};

use tenure_model::limits::WEIGHT_MAX;
use tenure_model::{MemberId, Partition, PartitionIndex, TopicId, TopicName};

use crate::{Input, Member};

/// A common multiple of all weights, so that shares compare exactly.
const UNITS: u64 = 232_792_560;

const _: () = {
    let mut weight = 1;
    while weight <= WEIGHT_MAX as u64 {
        assert!(UNITS.is_multiple_of(weight), "every weight divides the unit");
        weight += 1;
    }
};

fn weight_of(member: &Member) -> u32 {
    member.weight.clamp(1, WEIGHT_MAX)
}

/// Position of a member in the sorted list of members that may take something.
type MemberAt = usize;
/// Position of a kind.
type KindAt = usize;

/// Since when a partition is where it is, and which one; the last of a set moves first.
type Since = (u64, PartitionIndex);

/// Partitions of one topic that one member has in the plan and that may move on.
#[derive(Default)]
struct Holding {
    /// Not owned by this member today: moving it on costs nothing more.
    loose: BTreeSet<Since>,
    /// Owned by this member today.
    kept: BTreeSet<Since>,
}

pub(crate) struct Plan<'a> {
    input: &'a Input,
    members: Vec<&'a MemberId>,
    caps: Vec<usize>,
    /// What one partition counts with each member: less with one of more weight.
    units: Vec<u64>,
    loads: Vec<usize>,
    /// Who may take the partitions of a kind, sorted.
    kinds: Vec<Vec<MemberAt>>,
    kind_of: BTreeMap<Partition, KindAt>,
    /// Where a partition is today, if it may stay there.
    home: BTreeMap<Partition, MemberAt>,
    held: Vec<BTreeMap<KindAt, BTreeMap<TopicId, Holding>>>,
    topic_counts: Vec<BTreeMap<TopicId, usize>>,
    target: BTreeMap<Partition, MemberAt>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(input: &'a Input) -> Self {
        let able = || input.members.iter().filter(|(_, member)| !member.draining);
        let members: Vec<&MemberId> = able().map(|(id, _)| id).collect();
        let caps = able()
            .map(|(_, member)| member.partitions_max.map_or(usize::MAX, |max| max as usize))
            .collect();
        let units = able().map(|(_, member)| UNITS / u64::from(weight_of(member))).collect();
        let mut subscribers: BTreeMap<&TopicName, Vec<MemberAt>> = BTreeMap::new();
        for (at, (_, member)) in able().enumerate() {
            for topic in &member.topics {
                subscribers.entry(topic).or_default().push(at);
            }
        }
        let count = members.len();
        let mut plan = Self {
            input,
            members,
            caps,
            units,
            loads: vec![0; count],
            kinds: Vec::new(),
            kind_of: BTreeMap::new(),
            home: BTreeMap::new(),
            held: (0..count).map(|_| BTreeMap::new()).collect(),
            topic_counts: vec![BTreeMap::new(); count],
            target: BTreeMap::new(),
        };
        plan.sort_into_kinds(&subscribers);
        plan.place_pins(&subscribers);
        plan.keep();
        plan.fill(&subscribers);
        plan.balance();
        plan
    }

    pub(crate) fn finish(self) -> BTreeMap<Partition, MemberId> {
        let Self { members, target, .. } = self;
        target.into_iter().map(|(partition, at)| (partition, members[at].clone())).collect()
    }

    fn sort_into_kinds(&mut self, subscribers: &BTreeMap<&TopicName, Vec<MemberAt>>) {
        let mut known: BTreeMap<Vec<MemberAt>, KindAt> = BTreeMap::new();
        let mut kind_at = |candidates: Vec<MemberAt>| -> KindAt {
            let next = known.len();
            *known.entry(candidates).or_insert(next)
        };
        for (topic_id, topic) in &self.input.topics {
            let Some(all) = subscribers.get(&topic.name) else { continue };
            let usual = kind_at(all.clone());
            for index in (0..topic.partition_count).filter_map(PartitionIndex::new) {
                let partition = Partition { topic_id: *topic_id, index };
                let kind = match self.input.avoid.get(&partition) {
                    None => usual,
                    Some(avoid) => {
                        let rest: Vec<MemberAt> = all
                            .iter()
                            .copied()
                            .filter(|at| !avoid.contains(self.members[*at]))
                            .collect();
                        if rest.is_empty() { usual } else { kind_at(rest) }
                    }
                };
                self.kind_of.insert(partition, kind);
            }
        }
        self.kinds = vec![Vec::new(); known.len()];
        for (candidates, at) in known {
            self.kinds[at] = candidates;
        }
    }

    fn member_at(&self, member: &MemberId) -> Option<MemberAt> {
        self.members.binary_search(&member).ok()
    }

    fn has_room(&self, at: MemberAt) -> bool {
        self.loads[at] < self.caps[at]
    }

    fn place_pins(&mut self, subscribers: &BTreeMap<&TopicName, Vec<MemberAt>>) {
        for (partition, member) in &self.input.pins {
            let topic = self.input.topics.get(&partition.topic_id);
            let wanted = topic.and_then(|topic| subscribers.get(&topic.name));
            let Some(at) = self.member_at(member) else { continue };
            if self.kind_of.contains_key(partition)
                && wanted.is_some_and(|wanted| wanted.binary_search(&at).is_ok())
                && self.has_room(at)
            {
                self.loads[at] += 1;
                *self.topic_counts[at].entry(partition.topic_id).or_default() += 1;
                self.target.insert(*partition, at);
            }
        }
    }

    /// Leaves each partition where it is, if it may stay and the cap allows.
    fn keep(&mut self) {
        for (partition, member) in &self.input.current {
            let Some(kind) = self.kind_of.get(partition).copied() else { continue };
            let Some(at) = self.member_at(member) else { continue };
            if self.kinds[kind].binary_search(&at).is_err() || self.target.contains_key(partition) {
                continue;
            }
            self.home.insert(*partition, at);
            if self.has_room(at) {
                self.put(*partition, at);
            }
        }
    }

    /// Gives each partition that is left to the least loaded member; where all are full, through a chain.
    fn fill(&mut self, subscribers: &BTreeMap<&TopicName, Vec<MemberAt>>) {
        let mut left: Vec<(usize, Partition)> = self
            .kind_of
            .iter()
            .filter(|(partition, _)| !self.target.contains_key(partition))
            .map(|(partition, kind)| (self.kinds[*kind].len(), *partition))
            .collect();
        left.sort_unstable();
        let mut hopeless = BTreeSet::new();
        let mut refused = Vec::new();
        let mut room = Room::default();
        for (_, partition) in left {
            let kind = self.kind_of[&partition];
            room.turn_to(self, kind, partition.topic_id);
            if let Some(at) = room.take_least() {
                self.put(partition, at);
                room.give_back(self, at);
            } else if hopeless.contains(&kind) {
                refused.push(partition);
            } else if let Some(path) = self.chain(&self.kinds[kind], u64::MAX) {
                self.shift(&path);
                self.put(partition, path[0]);
                room = Room::default();
            } else {
                hopeless.insert(kind);
                refused.push(partition);
            }
        }
        for partition in refused {
            self.fall_back(partition, subscribers);
        }
    }

    /// Gives a partition to one of the members that it should avoid: better than to nobody.
    fn fall_back(
        &mut self,
        partition: Partition,
        subscribers: &BTreeMap<&TopicName, Vec<MemberAt>>,
    ) {
        let topic = self.input.topics.get(&partition.topic_id);
        let Some(all) = topic.and_then(|topic| subscribers.get(&topic.name)) else { return };
        let today = self.input.current.get(&partition).and_then(|member| self.member_at(member));
        let stays = today.filter(|at| all.binary_search(at).is_ok() && self.has_room(*at));
        if let Some(at) = stays.or_else(|| self.least_loaded(all, partition)) {
            self.put(partition, at);
        }
    }

    fn least_loaded(&self, candidates: &[MemberAt], partition: Partition) -> Option<MemberAt> {
        let with_room = candidates.iter().copied().filter(|at| self.has_room(*at));
        with_room.min_by_key(|at| self.rank(*at, partition.topic_id))
    }

    /// How well a member takes a partition of that topic: the lower the better.
    fn rank(&self, at: MemberAt, topic_id: TopicId) -> Rank {
        (self.growth(at), self.topic_count(at, topic_id), at)
    }

    /// What one more partition adds to the sum of squared loads over weights, in a common unit.
    fn growth(&self, at: MemberAt) -> u64 {
        (2 * self.loads[at] as u64 + 1) * self.units[at]
    }

    /// [`Plan::growth`] of a member that is not full.
    fn growth_with_room(&self, at: MemberAt) -> Option<(u64, MemberAt)> {
        self.has_room(at).then(|| (self.growth(at), at))
    }

    /// What one partition less takes off that sum; 0 where there is none.
    fn relief(&self, at: MemberAt) -> u64 {
        (2 * self.loads[at] as u64).saturating_sub(1) * self.units[at]
    }

    fn topic_count(&self, at: MemberAt, topic_id: TopicId) -> usize {
        self.topic_counts[at].get(&topic_id).copied().unwrap_or(0)
    }

    /// Moves along chains until none makes it more even: with equal weights, until none closes a gap of 2 or more. Each
    /// chain lowers the sum of squared loads over weights, so it ends.
    ///
    /// Who finds no chain once need not be asked again: a later chain runs only over members that it cannot reach, or
    /// its end would have been reachable too.
    fn balance(&mut self) {
        let mut by_relief: BTreeSet<(u64, MemberAt)> =
            (0..self.loads.len()).map(|at| (self.relief(at), at)).collect();
        let mut by_growth: BTreeSet<(u64, MemberAt)> =
            (0..self.loads.len()).filter_map(|at| self.growth_with_room(at)).collect();
        while let Some((relief, from)) = by_relief.pop_last() {
            // Nobody is a gain for this one, nor for those that have less to give.
            if by_growth.first().is_none_or(|(least, _)| *least >= relief) {
                break;
            }
            let Some(path) = self.chain(&[from], relief) else { continue };
            let to = path[path.len() - 1];
            by_relief.remove(&(self.relief(to), to));
            let before = [from, to].map(|at| self.growth_with_room(at));
            self.shift(&path);
            by_relief.insert((self.relief(to), to));
            by_relief.insert((self.relief(from), from));
            for known in before.into_iter().flatten() {
                by_growth.remove(&known);
            }
            by_growth.extend([from, to].into_iter().filter_map(|at| self.growth_with_room(at)));
        }
    }

    /// Shortest way from one of `starts` to a member with room that grows by less than `below`, the least loaded of the
    /// nearest. With one start, that member itself is no end.
    fn chain(&self, starts: &[MemberAt], below: u64) -> Option<Vec<MemberAt>> {
        let mut before: Vec<Option<MemberAt>> = vec![None; self.members.len()];
        let mut seen = vec![false; self.members.len()];
        let mut seen_kinds = vec![false; self.kinds.len()];
        for start in starts {
            seen[*start] = true;
        }
        let mut level: VecDeque<MemberAt> = starts.iter().copied().collect();
        while !level.is_empty() {
            let mut next = VecDeque::new();
            let mut best: Option<MemberAt> = None;
            for at in level {
                for kind in self.held[at].keys() {
                    if std::mem::replace(&mut seen_kinds[*kind], true) {
                        continue;
                    }
                    for to in &self.kinds[*kind] {
                        if std::mem::replace(&mut seen[*to], true) {
                            continue;
                        }
                        before[*to] = Some(at);
                        next.push_back(*to);
                        let ends = self.has_room(*to) && self.growth(*to) < below;
                        if ends && best.is_none_or(|best| self.growth(*to) < self.growth(best)) {
                            best = Some(*to);
                        }
                    }
                }
            }
            if let Some(end) = best {
                let mut path = vec![end];
                while let Some(at) = before[path[path.len() - 1]] {
                    path.push(at);
                }
                path.reverse();
                return Some(path);
            }
            level = next;
        }
        None
    }

    /// Moves one partition over each step of `path`, the last step first.
    fn shift(&mut self, path: &[MemberAt]) {
        for step in path.windows(2).rev() {
            let (from, to) = (step[0], step[1]);
            let partition =
                self.pick(from, to).expect("a chain goes only where a partition can go");
            self.take(partition, from);
            self.put(partition, to);
        }
    }

    /// The partition that `from` best gives to `to`: one that moves anyway, one of a topic of which `to` has few.
    fn pick(&self, from: MemberAt, to: MemberAt) -> Option<Partition> {
        let mut best: Option<((bool, isize), Partition)> = None;
        for (kind, topics) in &self.held[from] {
            if self.kinds[*kind].binary_search(&to).is_err() {
                continue;
            }
            let mut of_from = self.topic_counts[from].iter();
            let mut of_to = self.topic_counts[to].iter();
            for (topic_id, holding) in topics {
                let loose = holding.loose.last();
                let last = loose.or_else(|| holding.kept.last());
                let Some((_, index)) = last.copied() else { continue };
                let surplus =
                    seek(&mut of_from, *topic_id) as isize - seek(&mut of_to, *topic_id) as isize;
                let key = (loose.is_none(), -surplus);
                if best.as_ref().is_none_or(|(found, _)| key < *found) {
                    best = Some((key, Partition { topic_id: *topic_id, index }));
                }
            }
        }
        best.map(|(_, partition)| partition)
    }

    fn since(&self, partition: Partition) -> Since {
        (self.input.since.get(&partition).copied().unwrap_or(0), partition.index)
    }

    fn holding(&mut self, partition: Partition, at: MemberAt) -> &mut BTreeSet<Since> {
        let kind = self.kind_of[&partition];
        let holding = self.held[at].entry(kind).or_default().entry(partition.topic_id).or_default();
        if self.home.get(&partition) == Some(&at) { &mut holding.kept } else { &mut holding.loose }
    }

    fn put(&mut self, partition: Partition, at: MemberAt) {
        let since = self.since(partition);
        self.holding(partition, at).insert(since);
        self.loads[at] += 1;
        *self.topic_counts[at].entry(partition.topic_id).or_default() += 1;
        self.target.insert(partition, at);
    }

    fn take(&mut self, partition: Partition, at: MemberAt) {
        let since = self.since(partition);
        self.holding(partition, at).remove(&since);
        let kind = self.kind_of[&partition];
        if let Some(topics) = self.held[at].get_mut(&kind) {
            if topics.get(&partition.topic_id).is_some_and(Holding::is_empty) {
                topics.remove(&partition.topic_id);
            }
            if topics.is_empty() {
                self.held[at].remove(&kind);
            }
        }
        self.loads[at] -= 1;
        if let Some(count) = self.topic_counts[at].get_mut(&partition.topic_id) {
            *count -= 1;
        }
    }
}

/// See [`Plan::rank`].
type Rank = (u64, usize, MemberAt);

/// Who may take partitions of one kind and topic and is not full, the best first: partitions that follow each other in
/// [`Plan::fill`] mostly share it, and each costs a search of it and not of all members.
#[derive(Default)]
struct Room {
    of: Option<(KindAt, TopicId)>,
    ranks: BTreeSet<Rank>,
}

impl Room {
    fn turn_to(&mut self, plan: &Plan<'_>, kind: KindAt, topic_id: TopicId) {
        if self.of == Some((kind, topic_id)) {
            return;
        }
        self.of = Some((kind, topic_id));
        let with_room = plan.kinds[kind].iter().copied().filter(|at| plan.has_room(*at));
        self.ranks = with_room.map(|at| plan.rank(at, topic_id)).collect();
    }

    fn take_least(&mut self) -> Option<MemberAt> {
        self.ranks.pop_first().map(|(_, _, at)| at)
    }

    /// It has got one: its rank is another now.
    fn give_back(&mut self, plan: &Plan<'_>, at: MemberAt) {
        if let Some((_, topic_id)) = self.of.filter(|_| plan.has_room(at)) {
            self.ranks.insert(plan.rank(at, topic_id));
        }
    }
}

impl Holding {
    fn is_empty(&self) -> bool {
        self.loose.is_empty() && self.kept.is_empty()
    }
}

/// The count of `topic_id` in `counts`, which is read on from where the last call, for an earlier topic, left it.
fn seek(counts: &mut btree_map::Iter<'_, TopicId, usize>, topic_id: TopicId) -> usize {
    loop {
        let mut ahead = counts.clone();
        match ahead.next() {
            Some((id, _)) if *id < topic_id => *counts = ahead,
            Some((id, count)) if *id == topic_id => return *count,
            Some(_) | None => return 0,
        }
    }
}

//! What a heartbeat says of grants that stand still.

use super::*;
use crate::session::event::Progress;

struct Rig(Machine);

impl Rig {
    /// A member whose grant 0:e1 runs from offset 7, at 10 ms.
    fn new() -> Self {
        let mut rig = Self(Machine::new(settings(1)));
        for (ms, input) in [
            (0, Input::Tick),
            (0, Input::Connected),
            (1, joined(7, parse_assignment(&["v5", "0:e1"]))),
            (10, parse(&["acquired", "0:e1", "7"])),
        ] {
            rig.0.handle(input, at_ms(ms));
        }
        rig
    }

    fn progress(&mut self, ms: u64, position: u64, is_idle: bool) {
        let progress = Progress {
            position: NextOffset::new(position).unwrap(),
            end_offset: NextOffset::new(20).ok(),
            is_idle,
        };
        let (partition, epoch) = parse_grant("0:e1");
        self.0.handle(Input::Act(Act::Progress { partition, epoch, progress }), at_ms(ms));
    }

    /// What the heartbeat at this moment says of the grant.
    fn held(&mut self, ms: u64) -> v1::HeldPartition {
        let outputs = self.0.handle(Input::Tick, at_ms(ms));
        let beat = outputs.into_iter().find_map(|output| {
            let Output::Send(up) = output else { return None };
            let Some(Up::Heartbeat(beat)) = up.up else { return None };
            Some(beat)
        });
        let mut beat = beat.expect("a heartbeat is due");
        let answer = parse(&["answer", &beat.sequence.to_string(), "v5", "0:e1"]);
        self.0.handle(answer, at_ms(ms));
        beat.held.remove(0)
    }
}

#[test]
fn grant_whose_run_loop_says_nothing_stands_still() {
    // As when every thread of the runtime is blocked.
    let mut rig = Rig::new();
    assert_eq!(rig.held(1_010).still_ms, 1_000);
    assert_eq!(rig.held(2_010).still_ms, 2_000);
}

#[test]
fn grant_whose_handler_holds_records_stands_still_until_its_position_moves() {
    let mut rig = Rig::new();
    rig.progress(500, 8, false);
    rig.progress(900, 8, false);
    let held = rig.held(1_010);
    assert_eq!((held.still_ms, held.position, held.end_offset), (510, 8, Some(20)));
    rig.progress(1_500, 9, false);
    assert_eq!(rig.held(2_010).still_ms, 510);
}

#[test]
fn grant_whose_handler_waits_for_records_does_not_stand_still() {
    let mut rig = Rig::new();
    rig.progress(900, 7, true);
    assert_eq!(rig.held(1_010).still_ms, 110);
    rig.progress(1_900, 7, true);
    assert_eq!(rig.held(2_010).still_ms, 110);
}

#[test]
fn grant_that_is_loading_or_draining_does_not_stand_still() {
    let mut rig = Rig::new();
    let (partition, epoch) = parse_grant("0:e1");
    let phase = |phase| {
        let position = NextOffset::new(7).unwrap();
        Input::Act(Act::Phase { partition, epoch, phase, position, error: None })
    };
    rig.0.handle(phase(Phase::Resuming), at_ms(20));
    assert_eq!(rig.held(1_010).still_ms, 0);
    rig.0.handle(phase(Phase::Running), at_ms(1_500));
    assert_eq!(rig.held(2_010).still_ms, 510, "it counts from the end of the loading");
}

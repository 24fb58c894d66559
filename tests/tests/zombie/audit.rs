//! What the rounds have left behind, and what is wrong with it. The same for the suite and for its negative control.

use tenure_tests::cluster::block_on;
use tenure_tests::zombie::{Answer, Judge, Line};
use tokio_postgres::{Client, NoTls};

/// Notes each change of an offset and of an epoch in the transaction that makes it.
pub(crate) const HISTORY: &str = "\
CREATE TABLE moves (id bigserial PRIMARY KEY, what text, resource text, before bigint, after bigint);
CREATE FUNCTION note_offset() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO moves (what, resource, before, after)
    VALUES ('offset', NEW.resource, OLD.next_offset, NEW.next_offset);
    RETURN NULL;
END $$;
CREATE FUNCTION note_epoch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO moves (what, resource, before, after)
    VALUES ('epoch', NEW.resource, OLD.epoch, NEW.epoch);
    RETURN NULL;
END $$;
CREATE TRIGGER note_offset AFTER UPDATE ON tenure_fence FOR EACH ROW
    WHEN (OLD.next_offset IS DISTINCT FROM NEW.next_offset) EXECUTE FUNCTION note_offset();
CREATE TRIGGER note_offset AFTER UPDATE ON plain_offsets FOR EACH ROW
    WHEN (OLD.next_offset IS DISTINCT FROM NEW.next_offset) EXECUTE FUNCTION note_offset();
CREATE TRIGGER note_epoch AFTER UPDATE ON tenure_fence FOR EACH ROW
    WHEN (OLD.epoch IS DISTINCT FROM NEW.epoch) EXECUTE FUNCTION note_epoch();";

/// A database of one place.
pub(crate) struct Database {
    client: Client,
}

impl Database {
    pub(crate) fn connect(url: &str) -> Self {
        let client = block_on(async {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
            drop(tokio::spawn(connection));
            client
        });
        Self { client }
    }

    /// A single number; nothing: NULL, or no row.
    pub(crate) fn number(&self, query: &str) -> Option<i64> {
        let rows = block_on(self.client.query(query, &[]));
        rows.unwrap_or_else(|error| panic!("{query}: {error:?}")).first()?.get(0)
    }

    fn count(&self, query: &str) -> i64 {
        self.number(query).unwrap_or(0)
    }
}

/// One stop: the epoch that was stopped, and what was said to its late acts.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    pub(crate) number: u32,
    pub(crate) epoch: u64,
    pub(crate) late: Vec<Line>,
}

impl Stop {
    /// Late acts that `judge` refused for a newer epoch, or because no row has this one any more.
    fn refusals(&self, judge: Judge) -> usize {
        let counts = |line: &&Line| match line.answer {
            Some(Answer::Fenced) => line.current.is_some_and(|current| current > self.epoch),
            Some(Answer::NoRow) => true,
            // The server ended the transaction for its pause: true, but no word about the epoch.
            Some(Answer::Ended | Answer::Accepted | Answer::Failed) | None => false,
        };
        self.late.iter().filter(|line| line.judge == Some(judge)).filter(counts).count()
    }

    fn said(&self, answer: Answer) -> usize {
        let judged = self.late.iter().filter(|line| line.judge.is_some());
        judged.filter(|line| line.answer == Some(answer)).count()
    }
}

/// What the database and the offsets' home say in the end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Audit {
    pub(crate) produced: i64,
    pub(crate) lost: i64,
    pub(crate) duplicated: i64,
    pub(crate) out_of_order: i64,
    pub(crate) altered: i64,
    pub(crate) offsets_moved: i64,
    pub(crate) offsets_moved_back: i64,
    pub(crate) epochs_moved_back: i64,
}

impl Audit {
    /// Reads a database in which nobody writes any more. Each of `partitions` partitions has `records` records.
    pub(crate) fn of(database: &Database, partitions: u32, records: u64) -> Self {
        let produced = i64::from(partitions) * i64::try_from(records).unwrap();
        let lost = format!(
            "SELECT count(*) FROM generate_series(0, {partitions} - 1) AS p, \
             generate_series(0::bigint, {records} - 1) AS o \
             WHERE NOT EXISTS (SELECT FROM effects WHERE part = p AND at_offset = o)"
        );
        let moved = |what: &str, more: &str| {
            database.count(&format!("SELECT count(*) FROM moves WHERE what = '{what}' {more}"))
        };
        Self {
            produced,
            lost: database.count(&lost),
            duplicated: database
                .count("SELECT count(*) - count(DISTINCT (part, at_offset)) FROM effects"),
            out_of_order: database.count(
                "SELECT count(*) FROM (SELECT at_offset, lag(at_offset) \
                 OVER (PARTITION BY part ORDER BY id) AS before FROM effects) AS steps \
                 WHERE at_offset <= before",
            ),
            altered: database
                .count("SELECT count(*) FROM effects WHERE payload <> part || '/' || at_offset"),
            offsets_moved: moved("offset", ""),
            offsets_moved_back: moved("offset", "AND after < before"),
            epochs_moved_back: moved("epoch", "AND after < before"),
        }
    }

    /// Whether data or offsets suffered.
    pub(crate) const fn is_damaged(&self) -> bool {
        self.lost + self.duplicated + self.out_of_order + self.altered + self.offsets_moved_back > 0
    }
}

/// Everything that one place has seen.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) stops: Vec<Stop>,
    pub(crate) stops_wanted: usize,
    pub(crate) audit: Audit,
}

impl Outcome {
    fn sum(&self, count: impl Fn(&Stop) -> usize) -> usize {
        self.stops.iter().map(count).sum()
    }

    /// One line for people.
    pub(crate) fn figures(&self) -> String {
        let Audit { produced, lost, duplicated, out_of_order, .. } = self.audit;
        format!(
            "{} stops; late acts refused by the database {}, by the coordinator {}, ended by the \
             database {}, accepted {}, failed {}; of {produced} records {lost} lost, {duplicated} \
             duplicated, {out_of_order} out of order; of {} offset moves {} went back",
            self.stops.len(),
            self.sum(|stop| stop.refusals(Judge::Database)),
            self.sum(|stop| stop.refusals(Judge::Coordinator)),
            self.sum(|stop| stop.said(Answer::Ended)),
            self.sum(|stop| stop.said(Answer::Accepted)),
            self.sum(|stop| stop.said(Answer::Failed)),
            self.audit.offsets_moved,
            self.audit.offsets_moved_back,
        )
    }
}

/// All that is wrong with an outcome; empty: it holds.
pub(crate) fn faults(outcome: &Outcome) -> Vec<String> {
    let mut faults = Vec::new();
    if outcome.stops.len() < outcome.stops_wanted {
        faults.push(format!("{} of {} stops", outcome.stops.len(), outcome.stops_wanted));
    }
    let judges = [(Judge::Database, "the database"), (Judge::Coordinator, "the coordinator")];
    for stop in &outcome.stops {
        for (judge, name) in judges {
            if stop.refusals(judge) == 0 {
                faults.push(format!("stop {} was not refused by {name}", stop.number));
            }
        }
        let accepted = stop.said(Answer::Accepted);
        if accepted > 0 {
            faults.push(format!("stop {}: {accepted} late acts were accepted", stop.number));
        }
    }
    let Audit { lost, duplicated, out_of_order, altered, .. } = outcome.audit;
    let counts = [
        (lost, "records lost"),
        (duplicated, "records duplicated"),
        (out_of_order, "records out of order"),
        (altered, "records altered"),
        (outcome.audit.offsets_moved_back, "offsets moved back"),
        (outcome.audit.epochs_moved_back, "epochs moved back"),
    ];
    let found = counts.iter().filter(|(count, _)| *count > 0);
    faults.extend(found.map(|(count, what)| format!("{count} {what}")));
    faults
}

//! Locks in Redis: good for saving work, no protection.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::{LONGEST, Told, connect};

const TTL_MS: &str = "400";

/// Deletes the lock only if it is still ours, in one step.
const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

/// One command, one short answer.
fn ask(port: &str, words: &[&str]) -> String {
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(request.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    if line.starts_with('$') && !line.starts_with("$-1") {
        line.clear();
        reader.read_line(&mut line).unwrap();
    }
    line.trim().to_owned()
}

fn take(port: &str, name: &str) {
    let started = Instant::now();
    while ask(port, &["SET", "lock", name, "NX", "PX", TTL_MS]) != "+OK" {
        assert!(started.elapsed() < LONGEST, "the lock is never free");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// ann takes the lock first and oversleeps it; bob takes it meanwhile. Answers how many locks the release took away.
pub(crate) fn efficiency(told: &Told) -> u64 {
    let port = &told.at[0];
    if told.is_first() {
        take(port, "ann");
        ask(port, &["SET", "begun", "1"]);
        let started = Instant::now();
        while ask(port, &["GET", "lock"]) != "bob" {
            assert!(started.elapsed() < LONGEST, "bob never takes the lock");
            std::thread::sleep(Duration::from_millis(5));
        }
    } else {
        while ask(port, &["GET", "begun"]) != "1" {
            std::thread::sleep(Duration::from_millis(5));
        }
        take(port, "bob");
        // Long enough for ann to have released what it took for its own.
        ask(port, &["PEXPIRE", "lock", "60000"]);
        let started = Instant::now();
        while ask(port, &["GET", "ann-released"]) != "1" {
            assert!(started.elapsed() < LONGEST, "ann never releases");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let released = ask(port, &["EVAL", RELEASE, "1", "lock", &told.name]);
    ask(port, &["SET", &format!("{}-released", told.name), "1"]);
    released.trim_start_matches(':').parse().unwrap()
}

/// Both write once under the lock: to a row that compares nothing, and to one that compares an epoch. Answers how many
/// rows the latter changed.
pub(crate) async fn redlock(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let port = &told.at[1];
    if !told.is_first() {
        while ask(port, &["GET", "epoch"]) != "1" {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    take(port, &told.name);
    // A number that rises with every holder: what the lock itself does not give.
    let epoch: i64 = ask(port, &["INCR", "epoch"]).trim_start_matches(':').parse().unwrap();
    println!("{} holds the lock", told.name);
    if told.is_first() {
        // The pause: stopped from outside, and awake again only once the next holder is through.
        while ask(port, &["GET", "bob-wrote"]) != "1" {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let unfenced = "UPDATE doc SET body = $1 WHERE id = 'unfenced'";
    client.execute(unfenced, &[&told.name]).await.unwrap();
    let fenced = "UPDATE doc SET body = $1, epoch = $2 WHERE id = 'fenced' AND epoch <= $2";
    let changed = client.execute(fenced, &[&told.name, &epoch]).await.unwrap();
    ask(port, &["SET", &format!("{}-wrote", told.name), "1"]);
    println!("{} has written", told.name);
    changed
}

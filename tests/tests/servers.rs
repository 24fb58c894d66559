//! The harness itself: its real parts are real, and its tools do what the other tests rely on.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Message, Offset, TopicPartitionList};
use tenure_tests::process::Process;
use tenure_tests::proxy::{Direction, Proxy};
use tenure_tests::servers::{Kafka, Postgres, require, wait_until};

#[path = "servers/source.rs"]
mod source;

const TIMEOUT: Duration = Duration::from_secs(30);
/// Long enough for a loopback answer to arrive if it was not held.
const QUIET: Duration = Duration::from_millis(200);

#[test]
fn postgres_answers_and_is_gone_after_drop() {
    let Some(postgres) = require(Postgres::start()) else { return };
    let database = postgres.new_database();
    let made = "CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'x'), (2, 'y')";
    postgres.sql(&database, made);
    assert_eq!(postgres.sql(&database, "SELECT a, b FROM t ORDER BY a"), "1|x\n2|y");
    assert_eq!(postgres.sql("postgres", "SHOW max_connections"), "200");
    assert_eq!(postgres.sql("postgres", "SHOW fsync"), "on");

    let (pid, port) = (postgres.pid(), postgres.port());
    drop(postgres);
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the server still runs");
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect_err("the server still listens");
}

#[test]
fn answer_to_commit_is_held_back_though_postgres_has_committed() {
    let Some(postgres) = require(Postgres::shared()) else { return };
    let database = postgres.new_database();
    postgres.sql(&database, "CREATE TABLE t (a int)");
    let proxy = Proxy::to_port(postgres.port());
    let url = postgres.url_of(&database, proxy.port());
    proxy.hold_answers_after(b"COMMIT");

    let (said, answers) = std::sync::mpsc::channel();
    let client = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            client.batch_execute("BEGIN").await?;
            client.batch_execute("INSERT INTO t VALUES (7)").await?;
            said.send("inserted").unwrap();
            client.batch_execute("COMMIT").await?;
            said.send("committed").unwrap();
            Ok::<(), tokio_postgres::Error>(())
        })
    });

    assert_eq!(answers.recv_timeout(TIMEOUT).unwrap(), "inserted");
    assert!(proxy.held(TIMEOUT), "the proxy has not seen COMMIT");
    assert!(proxy.answer_kept(TIMEOUT), "PostgreSQL has not answered");
    assert_eq!(postgres.sql(&database, "SELECT a FROM t"), "7", "the row is not committed");
    answers.recv_timeout(QUIET).expect_err("the answer got through");
    proxy.release();
    assert_eq!(answers.recv_timeout(TIMEOUT).unwrap(), "committed");
    client.join().unwrap().unwrap();
}

#[test]
fn kafka_keeps_records_in_order_and_is_gone_after_drop() {
    let Some(kafka) = require(Kafka::start()) else { return };
    let topic = kafka.new_topic("orders", 2);
    let payloads: Vec<String> = (0..10).map(|number| format!("order {number}")).collect();
    kafka.produce(&topic, 1, &payloads);
    assert_eq!(read(&kafka, &topic, 1, payloads.len()), payloads);
    assert_eq!((kafka.end_offset(&topic, 0), kafka.end_offset(&topic, 1)), (0, 10));

    let pid = kafka.pid();
    drop(kafka);
    if let Some(pid) = pid {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the broker still runs");
    }
}

#[test]
fn second_producer_with_one_transactional_id_fences_the_first() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let topic = kafka.new_topic("fenced", 1);
    let producer = || -> BaseProducer {
        let mut config: ClientConfig = kafka.client_config();
        let producer: BaseProducer = config.set("transactional.id", &topic).create().unwrap();
        producer.init_transactions(TIMEOUT).unwrap();
        producer.begin_transaction().unwrap();
        producer
    };
    let send = |producer: &BaseProducer, payload: &str| {
        let record = BaseRecord::<(), str>::to(&topic).payload(payload);
        producer.send(record).map_err(|(error, _)| error).unwrap();
    };
    let first = producer();
    send(&first, "late");
    let second = producer();
    send(&second, "current");
    second.commit_transaction(TIMEOUT).unwrap();

    let refused = first.commit_transaction(TIMEOUT).expect_err("the first producer is fenced");
    let KafkaError::Transaction(cause) = &refused else { panic!("not about fencing: {refused}") };
    assert_eq!(cause.code(), RDKafkaErrorCode::Fenced, "{refused}");
    assert_eq!(read(kafka, &topic, 0, 1), ["current"]);
}

fn read(kafka: &Kafka, topic: &str, partition: i32, count: usize) -> Vec<String> {
    let mut config = kafka.client_config();
    config.set("group.id", topic).set("isolation.level", "read_committed");
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    consumer.assign(&list).unwrap();
    let next = || {
        let message = consumer.poll(TIMEOUT).expect("a record in time").expect("a record");
        String::from_utf8(message.payload().unwrap().to_vec()).unwrap()
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// A server that answers each connection's bytes with the same bytes.
fn echo() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut back = stream.try_clone().unwrap();
            thread::spawn(move || std::io::copy(&mut stream, &mut back));
        }
    });
    port
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn receive(stream: &mut TcpStream, count: usize) -> String {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn is_silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(QUIET)).unwrap();
    let silent = stream.peek(&mut [0]).is_err();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    silent
}

#[test]
fn held_direction_delivers_everything_in_order_after_release() {
    for direction in [Direction::ToServer, Direction::ToClient] {
        let proxy = Proxy::to_port(echo());
        let mut stream = connect(&proxy);
        stream.write_all(b"one").unwrap();
        assert_eq!(receive(&mut stream, 3), "one");
        proxy.hold(direction);
        stream.write_all(b"two").unwrap();
        assert!(is_silent(&mut stream), "{direction:?} is held");
        stream.write_all(b"three").unwrap();
        assert!(is_silent(&mut stream), "{direction:?} is held");
        proxy.release();
        assert_eq!(receive(&mut stream, 8), "twothree");
    }
}

#[test]
fn pattern_in_two_chunks_holds_answers_of_its_own_connection_only() {
    let proxy = Proxy::to_port(echo());
    let (mut first, mut second) = (connect(&proxy), connect(&proxy));
    proxy.hold_answers_after(b"COMMIT");
    first.write_all(b"COM").unwrap();
    assert_eq!(receive(&mut first, 3), "COM");
    first.write_all(b"MIT").unwrap();
    assert!(proxy.answer_kept(TIMEOUT));
    assert!(is_silent(&mut first));
    second.write_all(b"COMMIT").unwrap();
    assert_eq!(receive(&mut second, 6), "COMMIT", "the trigger fires once");
    proxy.release();
    assert_eq!(receive(&mut first, 3), "MIT");
}

#[test]
fn cut_ends_held_connections_without_their_bytes_and_takes_new_ones() {
    let proxy = Proxy::to_port(echo());
    let mut stream = connect(&proxy);
    proxy.hold_answers_after(b"x");
    stream.write_all(b"x").unwrap();
    assert!(proxy.answer_kept(TIMEOUT));
    proxy.cut();
    let rest = stream.read(&mut [0; 8]);
    assert!(matches!(rest, Ok(0) | Err(_)), "a held byte got through: {rest:?}");
    assert_eq!(proxy.connection_count(), 0);

    proxy.release();
    let mut stream = connect(&proxy);
    stream.write_all(b"y").unwrap();
    assert_eq!(receive(&mut stream, 1), "y");
    proxy.cut_direction(Direction::ToClient);
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "the client sees the end");
}

#[test]
fn paused_process_says_nothing_until_it_is_resumed() {
    let script = "trap 'echo ended; exit 3' TERM; i=0; \
        while :; do i=$((i+1)); echo line $i; sleep 0.02; done";
    let mut process = Process::spawn("counter", Command::new("sh").args(["-c", script]));
    process.wait_for_line(|line| line == "line 3", TIMEOUT).unwrap();
    process.pause();
    // What was in the pipe at the stop.
    thread::sleep(QUIET);
    let count = process.lines().len();
    thread::sleep(QUIET);
    assert_eq!(process.lines().len(), count, "a paused process goes on");
    process.resume();
    process.wait_for_line(|line| line == format!("line {}", count + 1), TIMEOUT).unwrap();
    process.terminate();
    process.wait_for_line(|line| line == "ended", TIMEOUT).unwrap();
    assert_eq!(process.wait(TIMEOUT).and_then(|status| status.code()), Some(3));
}

#[test]
fn waiting_for_a_line_ends_with_the_process_and_shows_its_output() {
    let mut command = Command::new("sh");
    let process = Process::spawn("talker", command.args(["-c", "echo out; echo err >&2"]));
    let error = process.wait_for_line(|line| line == "never", TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("talker closed its output"), "{error}");
    assert!(error.contains("out") && error.contains("err"), "{error}");
}

#[test]
fn paused_process_is_killed_on_drop() {
    let process = Process::spawn("sleeper", Command::new("sleep").arg("600"));
    let pid = process.pid();
    process.pause();
    drop(process);
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the process still runs");
}

/// Variable that makes [`helper_of_a_killed_test`] act.
const HELPER: &str = "TENURE_TESTS_HELPER";

/// Not a claim: the body of the process that the next test kills.
#[test]
fn helper_of_a_killed_test() {
    if std::env::var_os(HELPER).is_none() {
        return;
    }
    let sleeper = Process::spawn("sleeper", Command::new("sleep").arg("600"));
    let postgres = Postgres::start().ok();
    // The harness has written the test's name into the line already.
    println!("\nchild {}", sleeper.pid());
    if let Some(postgres) = &postgres {
        println!("child {}", postgres.pid());
    }
    println!("ready");
    sleeper.wait_for_line(|_| true, Duration::from_secs(600)).unwrap_err();
}

#[test]
fn nothing_outlives_a_killed_test_process() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "helper_of_a_killed_test", "--nocapture"]).env(HELPER, "1");
    let mut test = Process::spawn("test", &mut command);
    test.wait_for_line(|line| line == "ready", TIMEOUT).unwrap();
    test.kill();
    let lines = test.lines();
    let children: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("child ")).collect();
    assert!(!children.is_empty());
    for pid in children {
        // Its new parent may be slow to collect it.
        let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let is_gone = || stat().is_empty() || stat().contains(") Z ");
        assert!(wait_until(TIMEOUT, is_gone), "process {pid} outlives the test: {}", stat());
    }
}

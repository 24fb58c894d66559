//! Adobe's S3Mock: an S3 API that compares and writes in two steps, for tests that must find that out.

use std::path::Path;
use std::time::Duration;

use super::guarded::Guarded;
use super::kafka::{find_java, listens};
use super::{Missing, downloads, free_port, refuse_in_fast_tier, wait_until};

const PART: &str = "S3Mock";
/// Below the downloads; the version that `tests/run` fetches.
const JAR: &str = "s3mock-5.0.0/s3mock-5.0.0-exec.jar";
/// A first start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Another process may take the port between the look and the start.
const START_ATTEMPTS: usize = 3;

/// Replaces the server's own set-up, which opens a second port, and that one to the whole network.
const ONE_PORT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE beans PUBLIC "-//SPRING//DTD BEAN 2.0//EN" "https://www.springframework.org/dtd/spring-beans-2.0.dtd">
<beans>
  <bean id="webServerFactory" class="org.springframework.boot.tomcat.servlet.TomcatServletWebServerFactory"/>
</beans>
"#;

/// An S3Mock on a loopback port, with one bucket. Dropping it stops it and removes its data.
#[derive(Debug)]
pub struct S3Mock {
    // Kept for its end.
    _server: Guarded,
    port: u16,
}

impl S3Mock {
    /// The bucket.
    pub const BUCKET: &str = "bucket";

    /// Starts a server, in about ten seconds.
    ///
    /// # Errors
    ///
    /// [`Missing`] where Java or the jar are not found or in the fast tier.
    ///
    /// # Panics
    ///
    /// When it is there and does not start.
    pub fn start() -> Result<Self, Missing> {
        refuse_in_fast_tier(PART)?;
        let jar = downloads().map(|folder| folder.join(JAR)).filter(|jar| jar.is_file());
        let jar = jar.ok_or_else(|| {
            Missing::new(PART, format!("no {JAR} among the downloads; let tests/run fetch it"))
        })?;
        find_java(PART)?;
        let mut last_log = String::new();
        for _ in 0..START_ATTEMPTS {
            match Self::start_once(&jar) {
                Ok(server) => return Ok(server),
                Err(log) => last_log = log,
            }
        }
        panic!("S3Mock did not start; the end of its log:\n{last_log}");
    }

    /// Port on 127.0.0.1, without TLS.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    fn start_once(jar: &Path) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("tenure-s3mock-").tempdir().expect("a folder");
        let port = free_port();
        let root = folder.path().join("data");
        std::fs::create_dir(&root).expect("a new folder takes another");
        let one_port = folder.path().join("one-port.xml");
        std::fs::write(&one_port, ONE_PORT).expect("a new folder takes a file");
        let command = [
            "java".to_owned(),
            "-Xmx256m".into(),
            "-XX:+UseSerialGC".into(),
            "-XX:TieredStopAtLevel=1".into(),
            "-jar".into(),
            jar.display().to_string(),
            "--server.address=127.0.0.1".into(),
            format!("--server.port={port}"),
            "--server.ssl.enabled=false".into(),
            format!("--spring.main.sources=file:{}", one_port.display()),
            "--spring.main.allow-bean-definition-overriding=true".into(),
            format!("--com.adobe.testing.s3mock.store.root={}", root.display()),
            format!("--com.adobe.testing.s3mock.store.initialBuckets={}", Self::BUCKET),
        ];
        let server = Guarded::spawn(folder, None, "KILL", &command);
        wait_until(START_TIMEOUT, || listens(port) || !server.is_running());
        if server.is_running() && listens(port) {
            Ok(Self { _server: server, port })
        } else {
            Err(server.log_tail())
        }
    }
}

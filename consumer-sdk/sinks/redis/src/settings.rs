//! Settings.

use std::time::Duration;

use tenure_sdk::sink::{Fencing, SinkError};

/// Settings of a [`RedisSink`](crate::RedisSink).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Name of the sink in the group's settings. Default `redis`.
    pub name: String,
    /// Last part of the fence key, after the partition's hash tag. Default `tenure_fence`.
    pub fence: String,
    /// How long to wait for a connection. Default 5 s.
    pub connect_timeout: Duration,
    /// How long to wait for an answer, above 0. Default 5 s.
    pub response_timeout: Duration,
    /// Replicas that must have a registration before it counts. Default 0: a fail-over may lose it.
    pub replicas_min: u32,
    /// How long to wait for them, at least 1 ms. Default 1 s.
    pub wait_timeout: Duration,
    /// Whether they must have each write too, before it is answered. Default false.
    pub wait_on_write: bool,
    /// Lets commands write keys outside of the partition's hash tag, which a cluster would refuse. Default false.
    pub keys_without_tag: bool,
    /// Switches the fence **off**: an old owner's write goes through and damages the data. Only for negative controls
    /// that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl Default for RedisSettings {
    fn default() -> Self {
        Self {
            name: "redis".into(),
            fence: "tenure_fence".into(),
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(5),
            replicas_min: 0,
            wait_timeout: Duration::from_secs(1),
            wait_on_write: false,
            keys_without_tag: false,
            dangerously_without_fencing: false,
        }
    }
}

impl RedisSettings {
    pub(crate) const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    pub(crate) fn validate(&self) -> Result<(), SinkError> {
        let fault = if self.fence.is_empty() {
            "fence is empty, name a key"
        } else if self.response_timeout.is_zero() {
            "response_timeout is 0, give it some time"
        } else if self.replicas_min > 0 && self.wait_timeout < Duration::from_millis(1) {
            "wait_timeout is below 1 ms, which Redis takes for ever"
        } else if self.wait_on_write && self.replicas_min == 0 {
            "wait_on_write waits for no replica: set replicas_min"
        } else {
            return Ok(());
        };
        Err(SinkError::Misconfigured(fault.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let good = RedisSettings::default;
        good().validate().unwrap();
        for bad in [
            RedisSettings { fence: String::new(), ..good() },
            RedisSettings { response_timeout: Duration::ZERO, ..good() },
            RedisSettings { replicas_min: 1, wait_timeout: Duration::ZERO, ..good() },
            RedisSettings { wait_on_write: true, ..good() },
        ] {
            bad.validate().unwrap_err();
        }
    }
}

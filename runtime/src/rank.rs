//! Who this process is in a job: the variables that torchrun sets, plus the file with the job's secret.
//!
//! These are the only environment variables that configure the product. They are read once, here, and passed on as a value.

use std::net::SocketAddr;
use std::path::Path;
use zrt_collectives::store::Secret;

/// A rank's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// This rank, from 0.
    pub rank: usize,
    /// Ranks of the job.
    pub world_size: usize,
    /// This rank among those of its host, from 0.
    pub local_rank: usize,
    /// Ranks of this host.
    pub local_world_size: usize,
    /// Host of the rendezvous store: MASTER_ADDR, or what the launcher says beside the secret.
    pub master_addr: String,
    /// Port of the rendezvous store, likewise.
    pub master_port: u16,
    /// The job's secret, the same on all ranks. `None` when nobody launched this process, or another launcher did.
    pub job: Option<Secret>,
}

/// What is wrong with the rank variables.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum RankEnvError {
    /// Some are set and some are not.
    #[error(
        "{missing} is not set, though {present} is: a launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together; start with `zlaunch -n ...`"
    )]
    Missing {
        /// The variable that is missing.
        missing: &'static str,
        /// One that is set.
        present: &'static str,
    },
    /// Not a number, or out of range.
    #[error("{name}={value}: {what}")]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong.
        what: String,
    },
    /// The file with the secret is not usable.
    #[error("ZLAUNCH_JOB: {0}")]
    Job(zrt_collectives::Error),
}

impl RankEnv {
    /// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and ZLAUNCH_JOB. `None` when no launcher
    /// started this process (RANK and WORLD_SIZE are not set).
    pub fn read() -> Result<Option<RankEnv>, RankEnvError> {
        RankEnv::read_from(|name| std::env::var(name).ok())
    }

    /// A job of this one process, without a launcher.
    pub fn single() -> RankEnv {
        RankEnv { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1, master_addr: "127.0.0.1".into(), master_port: 0, job: None }
    }

    /// The same from any source of variables, for tests and embedders.
    pub fn read_from(get: impl Fn(&str) -> Option<String>) -> Result<Option<RankEnv>, RankEnvError> {
        let present = match (get("RANK").is_some(), get("WORLD_SIZE").is_some()) {
            (false, false) => return Ok(None),
            (true, _) => "RANK",
            (false, true) => "WORLD_SIZE",
        };
        let text = |name: &'static str| get(name).ok_or(RankEnvError::Missing { missing: name, present });
        let wrong = |name: &'static str, value: &str, what: String| RankEnvError::Value { name, value: value.into(), what };
        let count = |name: &'static str, value: String| -> Result<usize, RankEnvError> {
            value.trim().parse().map_err(|e| wrong(name, &value, format!("not a count: {e}")))
        };
        let rank = count("RANK", text("RANK")?)?;
        let world_size = count("WORLD_SIZE", text("WORLD_SIZE")?)?;
        let local_rank = count("LOCAL_RANK", text("LOCAL_RANK")?)?;
        let local_world_size = match get("LOCAL_WORLD_SIZE") {
            Some(value) => count("LOCAL_WORLD_SIZE", value)?,
            None => world_size,
        };
        if rank >= world_size {
            return Err(wrong("RANK", &rank.to_string(), format!("expected below WORLD_SIZE={world_size}")));
        }
        if local_rank >= local_world_size {
            return Err(wrong("LOCAL_RANK", &local_rank.to_string(), format!("expected below LOCAL_WORLD_SIZE={local_world_size}")));
        }
        if local_world_size > world_size {
            return Err(wrong("LOCAL_WORLD_SIZE", &local_world_size.to_string(), format!("more than WORLD_SIZE={world_size}")));
        }
        let port = text("MASTER_PORT")?;
        let mut master_port = port.trim().parse().map_err(|e| wrong("MASTER_PORT", &port, format!("not a port: {e}")))?;
        let mut master_addr = text("MASTER_ADDR")?;
        let mut job = None;
        if let Some(path) = get("ZLAUNCH_JOB") {
            let path = Path::new(&path);
            job = Some(Secret::read(path).map_err(RankEnvError::Job)?);
            if let Some(store) = store_beside(path) {
                (master_addr, master_port) = (store.ip().to_string(), store.port());
            }
        }
        Ok(Some(RankEnv { rank, world_size, local_rank, local_world_size, master_addr, master_port, job }))
    }
}

/// Name of the file beside the secret that holds the store's address (`ip:port`).
pub const STORE_ADDRESS_FILE: &str = "store";

/// A program that is not ours may listen on MASTER_PORT itself, as PyTorch's rank 0 does; so for such programs the launcher's
/// store is elsewhere, and a file beside the secret says where.
fn store_beside(secret: &Path) -> Option<SocketAddr> {
    std::fs::read_to_string(secret.with_file_name(STORE_ADDRESS_FILE)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Option<RankEnv>, RankEnvError> {
        RankEnv::read_from(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    const GOOD: [(&str, &str); 5] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];

    #[test]
    fn torchrun_variables_are_enough() {
        let env = read(&GOOD).unwrap().unwrap();
        assert_eq!((env.rank, env.world_size, env.local_world_size, env.master_port), (1, 2, 2, 29500));
        assert_eq!(read(&[]).unwrap(), None);
    }

    #[test]
    fn wrong_variables_are_named() {
        let text = read(&GOOD[..4]).unwrap_err().to_string();
        assert!(text.starts_with("MASTER_PORT is not set, though RANK is"), "{text}");
        let mut bad = GOOD;
        bad[0].1 = "2";
        assert_eq!(read(&bad).unwrap_err().to_string(), "RANK=2: expected below WORLD_SIZE=2");
        bad[0].1 = "x";
        assert!(read(&bad).unwrap_err().to_string().starts_with("RANK=x: not a count"));
    }

    #[test]
    fn the_secret_comes_from_the_named_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let secret = Secret::create(&path).unwrap();
        let mut pairs = GOOD.to_vec();
        pairs.push(("ZLAUNCH_JOB", path.to_str().unwrap()));
        assert_eq!(read(&pairs).unwrap().unwrap().job, Some(secret));
        std::fs::write(folder.path().join(STORE_ADDRESS_FILE), "127.0.0.1:77\n").unwrap();
        assert_eq!(read(&pairs).unwrap().unwrap().master_port, 77, "the launcher's store is not where MASTER_PORT points");
        std::fs::remove_file(&path).unwrap();
        assert!(read(&pairs).unwrap_err().to_string().starts_with("ZLAUNCH_JOB: "));
    }
}

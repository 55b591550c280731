//! From arguments to a running job: what is checked before, in which order things come to be, and what is left at the end.
//!
//! Everything that a person can get wrong is found before the first rank starts, and slow work (tokenizing) is done before
//! ranks wait for each other.

use crate::args::RunArgs;
use crate::fault::Fault;
use crate::folder::RunFolder;
use crate::oom;
use crate::screen::Screen;
use crate::spawn::{Event, Launch, Program};
use crate::supervise::{Rules, Supervisor};
use crate::work;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use zrt::config::Config;
use zrt::progress::{PROGRESS_KEY, RUN_END_KEY, StepReport};
use zrt::rank::STORE_ADDRESS_FILE;
use zrt_collectives::store::{MemoryStore, Secret, ServerOptions, Store, TcpStoreServer};

/// `zlaunch -n 2 train.toml`
pub fn launch_training(args: &RunArgs) -> Result<u8, Fault> {
    let file = args.file.as_deref().ok_or_else(|| Fault::user("what shall run? zlaunch -n 2 train.toml, or zlaunch -n 2 -- program"))?;
    let ranks = args.ranks.get();
    if file.extension() != Some(OsStr::new("toml")) {
        return Err(Fault::user(format!(
            "{} is not a .toml file; to start a program put -- before it: zlaunch -n {ranks} -- {}",
            file.display(),
            file.display()
        )));
    }
    if args.logs.is_some() {
        return Err(Fault::user("--logs is for programs (zlaunch -n 2 --logs DIR -- program); a training run logs in checkpoint.folder"));
    }
    let mut config = Config::load(file, &args.set)?;
    let device = zrt::device::resolve(&mut config, ranks)?;
    if !device.is_empty() {
        eprintln!("{device}");
    }
    let (mut config, chosen) = crate::choose::for_start(config, ranks)?;
    if let Some(chosen) = &chosen {
        eprintln!("{chosen}");
    }
    let batch = config.resolve(ranks).map_err(|mut e| {
        e.file = file.to_path_buf();
        e
    })?;
    if args.dry_run {
        return crate::print(work::dry_run(&config, batch)?);
    }
    let folder = RunFolder::claim(&config)?;
    // All ranks, and every later start of this run, see one day in their chat templates.
    config.data.now_secs = config.data.now_secs.or_else(|| folder.started()).or_else(now_secs);
    let report = work::prepare(&config, ranks)?;
    if !report.is_empty() {
        eprintln!("{}", report.trim_end());
    }
    folder.save_config(&config)?;

    let job = Job::start(None)?;
    let launch = Launch {
        program: Program::Trainer {
            config: folder.config.clone(),
            trace: args.trace,
            environment: zrt::device::environment(&config, ranks),
        },
        ranks,
        master: job.server.address(),
        secret: job.secret.clone(),
        logs: Some(folder.logs.clone()),
    };
    let seconds = |s: u64| Duration::from_secs(s.max(1));
    let rules = Rules {
        heartbeat: seconds(config.comm.heartbeat_timeout_seconds),
        together: Some(seconds(config.comm.train_timeout_seconds)),
        trainer: true,
    };
    let screen = job.run(&launch, rules, Screen::training(config.metrics.log_freq))?;
    let end = job.server.store().get(RUN_END_KEY, Duration::ZERO).ok();
    let end = end.and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default();
    crate::print(screen.summary(&end, &folder.path))
}

fn now_secs() -> Option<i64> {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok().map(|d| d.as_secs() as i64)
}

/// `zlaunch -n 4 -- ./my_trainer --its --args`
pub fn launch_program(args: &RunArgs) -> Result<u8, Fault> {
    if let Some(file) = &args.file {
        return Err(Fault::user(format!("both {} and a program after -- are given: one of them", file.display())));
    }
    for (given, name) in [(!args.set.is_empty(), "--set"), (args.trace, "--trace"), (args.dry_run, "--dry-run")] {
        if given {
            return Err(Fault::user(format!("{name} is for training runs; the program's own arguments go after --")));
        }
    }
    find_program(&args.program[0])?;
    if let Some(logs) = &args.logs {
        std::fs::create_dir_all(logs).map_err(|e| Fault::user(format!("--logs {}: {e}", logs.display())))?;
    }
    let job = Job::start(Some(()))?;
    let launch = Launch {
        program: Program::Foreign(args.program.clone()),
        ranks: args.ranks.get(),
        master: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port_for_program(args.master_port)?),
        secret: job.secret.clone(),
        logs: args.logs.clone(),
    };
    let rules = Rules { heartbeat: Duration::from_secs(args.heartbeat_timeout.max(1)), together: None, trainer: false };
    job.run(&launch, rules, Screen::foreign()).map(|_| 0)
}

/// A misspelt program is told once, not by every rank.
fn find_program(name: &OsStr) -> Result<(), Fault> {
    let runs = |path: &Path| std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    let path = Path::new(name);
    let found = match path.components().count() {
        1 if path.file_name() == Some(name) => {
            std::env::var_os("PATH").is_some_and(|dirs| std::env::split_paths(&dirs).any(|dir| runs(&dir.join(name))))
        }
        _ => runs(path),
    };
    if found {
        return Ok(());
    }
    let hint = match path.extension().and_then(OsStr::to_str) {
        Some("py") if path.exists() => format!("; a script needs its interpreter: -- python3 {}", path.display()),
        Some("toml") => format!("; a configuration goes without --: zlaunch {}", path.display()),
        _ if path.exists() => "; it is there but not executable".into(),
        _ => String::new(),
    };
    Err(Fault::user(format!("program {} is not found{hint}", path.display())))
}

/// A port that the program's rank 0 may listen on.
fn port_for_program(wanted: u16) -> Result<u16, Fault> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, wanted)).and_then(|l| l.local_addr());
    listener.map(|a| a.port()).map_err(|e| Fault::user(format!("--master-port {wanted}: {e}; choose another, or 0 for a free one")))
}

/// The store and the secret of one job, removed when dropped.
struct Job {
    server: TcpStoreServer,
    secret: std::path::PathBuf,
    _private: tempfile::TempDir,
}

impl Job {
    /// With `beside`, the store's address is written beside the secret, since MASTER_PORT is the program's.
    fn start(beside: Option<()>) -> Result<Job, Fault> {
        let private = tempfile::Builder::new()
            .prefix("zlaunch-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|e| Fault::user(format!("a private folder in {}: {e}", std::env::temp_dir().display())))?;
        let secret = private.path().join("secret");
        let server = Secret::create(&secret).and_then(|s| TcpStoreServer::start(s, ServerOptions::default())).map_err(Fault::other)?;
        if beside.is_some() {
            let path = private.path().join(STORE_ADDRESS_FILE);
            std::fs::write(&path, format!("{}\n", server.address())).map_err(|e| Fault::other(format!("{}: {e}", path.display())))?;
        }
        Ok(Job { server, secret, _private: private })
    }

    fn run(&self, launch: &Launch, rules: Rules, screen: Screen) -> Result<Screen, Fault> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Fault::other(format!("the launcher's event loop: {e}")))?;
        runtime.block_on(async {
            let (events, inbox) = unbounded_channel();
            let oom = oom::Counters::read();
            let processes = (0..launch.ranks).map(|rank| launch.spawn(rank, &events)).collect::<Result<Vec<_>, _>>()?;
            let reader = ProgressReader::start(self.server.store(), events)?;
            let done = Supervisor::new(processes, inbox, self.server.store(), screen, rules, oom).run().await;
            drop(reader);
            done
        })
    }
}

/// Turns what rank 0 publishes into events. A thread of its own, so that it can wait in the store and miss no step of a fast run.
struct ProgressReader {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

const PROGRESS_WAIT: Duration = Duration::from_millis(100);

impl ProgressReader {
    fn start(store: MemoryStore, events: UnboundedSender<Event>) -> Result<ProgressReader, Fault> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let read = move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok(json) = store.get(PROGRESS_KEY, PROGRESS_WAIT) else { continue };
                // Taken away, so that the next wait is for the next step.
                let _ = store.delete(PROGRESS_KEY);
                if let Ok(report) = serde_json::from_slice::<StepReport>(&json)
                    && events.send(Event::Step(report)).is_err()
                {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("progress".into()).spawn(read);
        thread.map(|t| ProgressReader { stop, thread: Some(t) }).map_err(|e| Fault::other(format!("the launcher's progress thread: {e}")))
    }
}

impl Drop for ProgressReader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

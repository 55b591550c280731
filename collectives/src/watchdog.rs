//! Who notices a lost group while the rank is busy computing? A thread that polls [`Communicator::health`] and calls back once.

use crate::{Communicator, Error, Health};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Polls a communicator until it is lost, until the communicator is gone, or until this value is dropped.
pub struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Asks `comm` every `every` whether the group is good; calls `on_lost` with the first error, at most once, on its own thread.
    /// Does not keep the communicator alive. Errors: the thread could not be made.
    pub fn start<C>(comm: &Arc<C>, every: Duration, on_lost: impl FnOnce(Error) + Send + 'static) -> std::io::Result<Watchdog>
    where
        C: Communicator + ?Sized + 'static,
    {
        let comm: Weak<C> = Arc::downgrade(comm);
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            while let Some(comm) = comm.upgrade() {
                if let Health::Lost(error) = comm.health() {
                    drop(comm);
                    return on_lost(error);
                }
                drop(comm);
                let lock = stopped.0.lock().unwrap_or_else(|e| e.into_inner());
                let wait = stopped.1.wait_timeout_while(lock, every, |stop| !*stop);
                if *wait.unwrap_or_else(|e| e.into_inner()).0 {
                    return;
                }
            }
        })?;
        Ok(Watchdog { stop, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // The callback itself may drop the watchdog; a thread cannot join itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

//! What is a stream? A queue and a thread that runs its operations one after the other, as asynchronous as a real one. Events are
//! points that an operation completes; an error of an operation is the device's from then on, and what follows is skipped.

use crate::clock::{self, Kind, Span};
use crate::device::{Device, Machine};
use crate::memory::lock;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A place in a stream that is passed or not, and when.
#[derive(Default)]
pub struct Point {
    time: Mutex<Option<u64>>,
    passed: Condvar,
}

impl Point {
    fn complete(&self, time: u64) {
        *lock(&self.time) = Some(time);
        self.passed.notify_all();
    }

    /// Virtual time at which it was passed; `None`: not yet.
    pub fn time(&self) -> Option<u64> {
        *lock(&self.time)
    }

    /// Waits until it is passed.
    pub fn wait(&self) -> u64 {
        let mut time = lock(&self.time);
        loop {
            if let Some(time) = *time {
                return time;
            }
            time = self.passed.wait(time).unwrap_or_else(|e| e.into_inner());
        }
    }
}

/// What an operation does when it runs; an error code fails the device.
pub type Action = Box<dyn FnOnce(&'static Device) -> Result<(), i32> + Send>;

/// An operation that takes virtual time.
pub struct Task {
    pub kind: Kind,
    pub name: Cow<'static, str>,
    pub bytes: u64,
    /// Virtual nanoseconds.
    pub cost: u64,
    pub run: Action,
}

enum Op {
    Task(Task, u64),
    Wait(Arc<Point>),
    Record(Arc<Point>),
}

#[derive(Default)]
struct Queue {
    ops: VecDeque<Op>,
    given: u64,
    done: u64,
    /// Virtual time at which the last operation ended.
    time: u64,
    sleeping: bool,
    closed: bool,
}

/// A stream of a device.
pub struct Stream {
    /// Its handle.
    pub id: u64,
    pub device: &'static Device,
    /// Synchronizes with the default stream.
    pub blocking: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Stream {
    /// A stream and its thread, which nobody joins: it ends with the stream or the process.
    pub fn start(id: u64, device: &'static Device, blocking: bool) -> std::io::Result<Arc<Stream>> {
        let stream = Arc::new(Stream { id, device, blocking, queue: Mutex::default(), changed: Condvar::new() });
        let worker = stream.clone();
        std::thread::Builder::new().name(format!("gpu{} stream", device.index)).spawn(move || worker.work())?;
        Ok(stream)
    }

    fn push(&self, op: Op) {
        let mut queue = lock(&self.queue);
        queue.ops.push_back(op);
        queue.given += 1;
        if queue.sleeping {
            self.changed.notify_all();
        }
    }

    /// Enqueues an operation, which begins no earlier than this host thread is.
    pub fn task(&self, task: Task) {
        self.push(Op::Task(task, clock::host_time()));
    }

    /// Runs an operation that does nothing at once, if nothing is before it; else it is enqueued.
    pub fn empty_task(&self, task: Task) {
        let mut queue = lock(&self.queue);
        if queue.given == queue.done {
            queue.given += 1;
            queue.done += 1;
            queue.time = self.place(&task, queue.time.max(clock::host_time()));
            return;
        }
        drop(queue);
        self.task(task);
    }

    /// What follows waits for the point.
    pub fn wait_for(&self, point: Arc<Point>) {
        self.push(Op::Wait(point));
    }

    /// A point behind what was enqueued so far.
    pub fn record(&self) -> Arc<Point> {
        let point = Arc::new(Point::default());
        {
            let mut queue = lock(&self.queue);
            if queue.given == queue.done {
                point.complete(queue.time);
                return point;
            }
            queue.ops.push_back(Op::Record(point.clone()));
            queue.given += 1;
        }
        point
    }

    /// Whether all has run.
    pub fn idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.given == queue.done
    }

    /// The same, for a host thread that goes by it.
    pub fn query(&self) -> bool {
        let idle = self.idle();
        if idle {
            clock::host_waited(lock(&self.queue).time);
        }
        idle
    }

    /// Waits for what was enqueued until now.
    pub fn synchronize(&self) {
        let mut queue = lock(&self.queue);
        let until = queue.given;
        while queue.done < until {
            queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        clock::host_waited(queue.time);
    }

    /// Ends when all has run. The device still waits for it.
    pub fn close(self: &Arc<Stream>) {
        let mut closing = lock(&self.device.closing);
        closing.retain(|s| !s.idle());
        closing.push(self.clone());
        drop(closing);
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    /// Gives an operation its place in virtual time; the time at which it ends.
    fn place(&self, task: &Task, ready: u64) -> u64 {
        let machine = Machine::get();
        let start = self.device.engines.take(task.kind, ready, task.cost);
        let end = start + task.cost;
        if let Some(timeline) = &machine.timeline {
            let (name, bytes, kind) = (&*task.name, task.bytes, task.kind);
            timeline.write(&Span { device: self.device.index, stream: self.id, kind, name, bytes, start, end });
        }
        end
    }

    fn work(&self) {
        let mut random = Machine::get().settings.jitter.map(|seed| seed ^ self.id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        loop {
            let (op, mut time) = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(op) = queue.ops.pop_front() {
                        break (op, queue.time);
                    }
                    if queue.closed {
                        drop(queue);
                        if let Some(timeline) = &Machine::get().timeline {
                            timeline.flush();
                        }
                        return;
                    }
                    queue.sleeping = true;
                    queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
                    queue.sleeping = false;
                }
            };
            if let Some(state) = &mut random {
                std::thread::sleep(Duration::from_micros(next(state) % 1000));
            }
            Machine::get().gate.pass();
            match op {
                Op::Wait(point) => time = time.max(point.wait()),
                Op::Record(point) => point.complete(time),
                Op::Task(task, ready) => {
                    if self.device.error() == 0 {
                        time = self.place(&task, time.max(ready));
                        if let Err(code) = (task.run)(self.device) {
                            self.device.fail(code);
                        }
                    }
                }
            }
            let mut queue = lock(&self.queue);
            queue.time = time;
            queue.done += 1;
            drop(queue);
            self.changed.notify_all();
        }
    }
}

/// What a test can close, so that it decides what operations are behind.
#[derive(Default)]
pub struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut closed = lock(&self.closed);
        while *closed {
            closed = self.opened.wait(closed).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Closed, no operation of any stream begins.
    pub fn close(&self, closed: bool) {
        *lock(&self.closed) = closed;
        self.opened.notify_all();
    }
}

/// The next of a sequence of random numbers.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// An event: the point of its latest record.
pub struct Event {
    pub device: &'static Device,
    pub timed: bool,
    pub latest: Mutex<Option<Arc<Point>>>,
}

/// Numbers for handles, which no other object of the process has.
pub fn next_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Not an address that anyone may follow, and aligned as one would be.
    0x6770_0000_0000 + 16 * NEXT.fetch_add(1, Ordering::Relaxed)
}

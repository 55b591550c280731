//! The store over TCP: one server thread per connection in front of a [`MemoryStore`], and a client that takes a connection
//! per call in flight, so that a thread that waits for a key never holds up the thread that will set it.

use super::memory::not_set;
use super::secret::Secret;
use super::wire::Link;
use super::{MAX_WAIT, MemoryStore, Store, check_key, check_keys, fail, from_now};
use crate::{Error, Result};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SET: u8 = 1;
const GET: u8 = 2;
const ADD: u8 = 3;
const CHECK: u8 = 4;
const WAIT: u8 = 5;
const DELETE: u8 = 6;

const DONE: u8 = 0;
const FAILED: u8 = 1;
/// The answer to GET and WAIT when the deadline passed; the payload is the missing key.
const MISSING: u8 = 2;

/// How often a server thread that waits for a key looks whether its client still lives.
const LOOK: Duration = Duration::from_millis(500);
/// A reply may come this much after the deadline that the client sent.
const GRACE: Duration = Duration::from_secs(10);

/// Where and how the server listens.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Address to bind: the loopback address unless ranks of other hosts must reach it.
    pub address: IpAddr,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// Authenticated connections at a time.
    pub max_connections: usize,
    /// Connections that have not yet proved that they know the secret.
    pub max_handshakes: usize,
    /// Time for the whole handshake.
    pub handshake_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            max_connections: 1024,
            max_handshakes: 64,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

#[derive(Default)]
struct Connections {
    open: HashMap<u64, TcpStream>,
    handshakes: usize,
    next: u64,
}

struct Shared {
    store: MemoryStore,
    secret: Secret,
    options: ServerOptions,
    stop: AtomicBool,
    connections: Mutex<Connections>,
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Serves a [`MemoryStore`] until dropped; dropping ends all connections and waits.
pub struct TcpStoreServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    accept: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Binds and serves. Errors say when the port is in use, and what to do.
    pub fn start(secret: Secret, options: ServerOptions) -> Result<TcpStoreServer> {
        let wanted = SocketAddr::new(options.address, options.port);
        let listener = match TcpListener::bind(wanted) {
            Ok(listener) => listener,
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                return fail(format!(
                    "port {} on {} is in use, perhaps by another job; choose another port, or port 0 for a free one",
                    options.port, options.address
                ));
            }
            Err(e) => return fail(format!("listening on {wanted}: {e}")),
        };
        let address = match listener.local_addr() {
            Ok(address) => address,
            Err(e) => return fail(format!("listening on {wanted}: {e}")),
        };
        let shared =
            Arc::new(Shared { store: MemoryStore::new(), secret, options, stop: AtomicBool::new(false), connections: Mutex::default() });
        let serving = shared.clone();
        match std::thread::Builder::new().name("store".into()).spawn(move || accept_loop(&serving, &listener)) {
            Ok(accept) => Ok(TcpStoreServer { shared, address, accept: Some(accept) }),
            Err(e) => fail(format!("starting the store's thread: {e}")),
        }
    }

    /// The address in use, with the port that was taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The content, for the process that owns the server.
    pub fn store(&self) -> MemoryStore {
        self.shared.store.clone()
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.store.close();
        for stream in self.shared.connections().open.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut wake = self.address;
        if wake.ip().is_unspecified() {
            wake.set_ip(if wake.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { std::net::Ipv6Addr::LOCALHOST.into() });
        }
        // The accept loop sleeps in accept(); a connection of our own wakes it, and it sees `stop`.
        let woken = TcpStream::connect_timeout(&wake, Duration::from_secs(1)).is_ok();
        if let Some(thread) = self.accept.take()
            && woken
        {
            let _ = thread.join();
        }
    }
}

fn accept_loop(shared: &Arc<Shared>, listener: &TcpListener) {
    loop {
        let stream = listener.accept();
        if shared.stop.load(SeqCst) {
            return;
        }
        let Ok((stream, _)) = stream else {
            // Out of descriptors, or the client went away: the next accept may do better.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let Ok(handle) = stream.try_clone() else { continue };
        let id = {
            let mut connections = shared.connections();
            let proved = connections.open.len() - connections.handshakes;
            if connections.handshakes >= shared.options.max_handshakes || proved >= shared.options.max_connections {
                continue;
            }
            let id = connections.next;
            connections.next += 1;
            connections.handshakes += 1;
            connections.open.insert(id, handle);
            id
        };
        let serving = shared.clone();
        let spawned = std::thread::Builder::new().name("store client".into()).spawn(move || {
            let _ = stream.set_nodelay(true);
            let link = Link::accept(stream, &serving.secret, from_now(serving.options.handshake_timeout));
            serving.connections().handshakes -= 1;
            match link {
                Ok(link) => serve(&serving, link),
                Err(e) => tracing::debug!("store: a connection was refused: {e}"),
            }
            serving.connections().open.remove(&id);
        });
        if spawned.is_err() {
            let mut connections = shared.connections();
            connections.handshakes -= 1;
            connections.open.remove(&id);
        }
    }
}

fn serve(shared: &Shared, mut link: Link) {
    loop {
        let request = match link.receive(None) {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(e) => return tracing::warn!("store: {e}"),
        };
        let Some(reply) = answer(shared, &link, &request) else { return };
        if link.send(&reply).is_err() || shared.stop.load(SeqCst) {
            return;
        }
    }
}

fn reply(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&[kind], payload].concat()
}

/// `None` when the client left while its request waited.
fn answer(shared: &Shared, link: &Link, request: &[u8]) -> Option<Vec<u8>> {
    let result = Request::read(request).and_then(|request| {
        let store = &shared.store;
        Ok(Some(match request {
            Request::Set(key, value) => store.set(key, value).map(|()| reply(DONE, &[]))?,
            Request::Add(key, amount) => store.add(key, amount).map(|n| reply(DONE, &n.to_le_bytes()))?,
            Request::Check(keys) => store.check(&keys).map(|yes| reply(DONE, &[yes as u8]))?,
            Request::Delete(key) => store.delete(key).map(|yes| reply(DONE, &[yes as u8]))?,
            Request::Get(key, deadline) => match wait(shared, link, &[key], deadline)? {
                None => return Ok(None),
                Some(Some(missing)) => reply(MISSING, missing.as_bytes()),
                Some(None) => match store.value(key) {
                    Some(value) => reply(DONE, &value),
                    None => reply(MISSING, key.as_bytes()),
                },
            },
            Request::Wait(keys, deadline) => match wait(shared, link, &keys, deadline)? {
                None => return Ok(None),
                Some(Some(missing)) => reply(MISSING, missing.as_bytes()),
                Some(None) => reply(DONE, &[]),
            },
        }))
    });
    match result {
        Ok(reply) => reply,
        Err(Error::Rendezvous(text)) => Some(reply(FAILED, text.as_bytes())),
        Err(other) => Some(reply(FAILED, other.to_string().as_bytes())),
    }
}

/// The first missing key once `deadline` has passed, or `None` inside when all are set; outer `None` when the client left.
fn wait(shared: &Shared, link: &Link, keys: &[&str], deadline: Duration) -> Result<Option<Option<String>>> {
    check_keys(keys)?;
    let until = from_now(deadline);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match shared.store.wait_briefly(keys, left.min(LOOK))? {
            None => return Ok(Some(None)),
            Some(key) if left <= LOOK => return Ok(Some(Some(key))),
            Some(_) if link.closed() => return Ok(None),
            Some(_) => {}
        }
    }
}

enum Request<'a> {
    Set(&'a str, &'a [u8]),
    Get(&'a str, Duration),
    Add(&'a str, i64),
    Check(Vec<&'a str>),
    Wait(Vec<&'a str>, Duration),
    Delete(&'a str),
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_wait(out: &mut Vec<u8>, deadline: Duration) {
    out.extend((deadline.min(MAX_WAIT).as_millis() as u64).to_le_bytes());
}

fn put_keys(out: &mut Vec<u8>, keys: &[&str]) {
    out.extend((keys.len() as u32).to_le_bytes());
    keys.iter().for_each(|key| put_text(out, key));
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(bytes)?;
        self.0 = tail;
        Some(head)
    }
    fn number<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    fn text(&mut self) -> Option<&'a str> {
        let bytes = u32::from_le_bytes(self.number()?) as usize;
        std::str::from_utf8(self.take(bytes)?).ok()
    }
    fn wait(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(u64::from_le_bytes(self.number()?)).min(MAX_WAIT))
    }
    fn keys(&mut self) -> Option<Vec<&'a str>> {
        let count = u32::from_le_bytes(self.number()?) as usize;
        (count <= super::MAX_KEYS).then_some(())?;
        (0..count).map(|_| self.text()).collect()
    }
}

impl<'a> Request<'a> {
    fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Request::Set(key, value) => {
                out.push(SET);
                put_text(&mut out, key);
                out.extend(*value);
            }
            Request::Get(key, deadline) => {
                out.push(GET);
                put_wait(&mut out, *deadline);
                put_text(&mut out, key);
            }
            Request::Add(key, amount) => {
                out.push(ADD);
                put_text(&mut out, key);
                out.extend(amount.to_le_bytes());
            }
            Request::Check(keys) => {
                out.push(CHECK);
                put_keys(&mut out, keys);
            }
            Request::Wait(keys, deadline) => {
                out.push(WAIT);
                put_wait(&mut out, *deadline);
                put_keys(&mut out, keys);
            }
            Request::Delete(key) => {
                out.push(DELETE);
                put_text(&mut out, key);
            }
        }
        out
    }

    fn read(bytes: &'a [u8]) -> Result<Request<'a>> {
        let mut r = Reader(bytes);
        let mut read = || {
            Some(match r.take(1)?[0] {
                SET => {
                    let key = r.text()?;
                    let rest = r.0.len();
                    Request::Set(key, r.take(rest)?)
                }
                GET => {
                    let deadline = r.wait()?;
                    Request::Get(r.text()?, deadline)
                }
                ADD => Request::Add(r.text()?, i64::from_le_bytes(r.number()?)),
                CHECK => Request::Check(r.keys()?),
                WAIT => {
                    let deadline = r.wait()?;
                    Request::Wait(r.keys()?, deadline)
                }
                DELETE => Request::Delete(r.text()?),
                _ => return None,
            })
        };
        match read() {
            Some(request) if r.0.is_empty() => Ok(request),
            _ => fail(format!("a request of {} bytes makes no sense; do both sides run the same version?", bytes.len())),
        }
    }
}

/// A client of a [`TcpStoreServer`]. Threads may share it; each call in flight has its own connection.
pub struct TcpStore {
    address: SocketAddr,
    secret: Secret,
    idle: Mutex<Vec<Link>>,
}

impl TcpStore {
    /// Connects and proves both sides; tries again while nobody listens, until `deadline`.
    pub fn connect(address: SocketAddr, secret: Secret, deadline: Duration) -> Result<TcpStore> {
        let store = TcpStore { address, secret, idle: Mutex::default() };
        let link = store.dial(deadline)?;
        store.put_back(link);
        Ok(store)
    }

    fn put_back(&self, link: Link) {
        self.idle.lock().unwrap_or_else(|e| e.into_inner()).push(link);
    }

    /// A new connection. Tries again while nobody listens or the server is busy; a wrong secret is final.
    fn dial(&self, deadline: Duration) -> Result<Link> {
        let until = from_now(deadline);
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let error = match TcpStream::connect_timeout(&self.address, left) {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    match Link::connect(stream, &self.secret, until) {
                        Ok(Some(link)) => return Ok(link),
                        Ok(None) => "it closed the connection".to_string(),
                        Err(Error::Rendezvous(text)) => return fail(format!("store at {}: {text}", self.address)),
                        Err(other) => return Err(other),
                    }
                }
                Err(error) => error.to_string(),
            };
            if Instant::now() + Duration::from_millis(50) >= until {
                let secs = deadline.as_secs_f64();
                return fail(format!("no store at {} within {secs:.1} s: {error}; is the launcher running?", self.address));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// One request and its reply's payload; `Ok(Err(key))` when the deadline passed without `key`.
    fn call(&self, request: &Request, deadline: Duration) -> Result<std::result::Result<Vec<u8>, String>> {
        let idle = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let mut link = match idle {
            Some(link) => link,
            None => self.dial(GRACE)?,
        };
        let until = from_now(deadline) + GRACE;
        let frame = link.send(&request.write()).and_then(|()| link.receive(Some(until)));
        // A link that failed is dropped here: its sequence is broken.
        let frame = match frame {
            Ok(Some(frame)) => frame,
            Ok(None) => return fail(format!("the store at {} closed the connection; has the launcher ended?", self.address)),
            Err(Error::Rendezvous(text)) => return fail(format!("store at {}: {text}", self.address)),
            Err(other) => return Err(other),
        };
        self.put_back(link);
        let text = || String::from_utf8_lossy(&frame[1..]).into_owned();
        match frame.first() {
            Some(&DONE) => Ok(Ok(frame[1..].to_vec())),
            Some(&MISSING) => Ok(Err(text())),
            Some(&FAILED) => fail(text()),
            _ => fail("the store's reply makes no sense; do both sides run the same version?".to_string()),
        }
    }

    /// As `call`, for requests that do not wait.
    fn now(&self, request: &Request) -> Result<Vec<u8>> {
        self.call(request, Duration::ZERO)?.or_else(|key| not_set(&key, Duration::ZERO))
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        if value.len() > super::MAX_VALUE_BYTES {
            return fail(format!("the value of '{key}' has {} bytes, expected at most {}", value.len(), super::MAX_VALUE_BYTES));
        }
        self.now(&Request::Set(key, value)).map(|_| ())
    }

    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        self.call(&Request::Get(key, deadline), deadline)?.or_else(|key| not_set(&key, deadline))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check_key(key)?;
        match <[u8; 8]>::try_from(self.now(&Request::Add(key, amount))?) {
            Ok(bytes) => Ok(i64::from_le_bytes(bytes)),
            Err(_) => fail("the store's reply to add makes no sense".to_string()),
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys(keys)?;
        Ok(self.now(&Request::Check(keys.to_vec()))? == [1])
    }

    fn wait(&self, keys: &[&str], deadline: Duration) -> Result<()> {
        check_keys(keys)?;
        self.call(&Request::Wait(keys.to_vec(), deadline), deadline)?.map(|_| ()).or_else(|key| not_set(&key, deadline))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        Ok(self.now(&Request::Delete(key))? == [1])
    }
}

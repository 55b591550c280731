//! How do ranks find each other? The unique id names a socket of the process that made it. There each rank tells its number and the
//! name of its own socket; when all did, each learns the names of all, and connects to those below it. All waits end with an abort.

use super::result;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a unique id.
pub const ID_BYTES: usize = 128;
/// Bytes of a socket's name.
const NAME: usize = 48;
/// How often a wait looks whether it was aborted.
const TICK: Duration = Duration::from_millis(10);

fn fresh_name() -> [u8; NAME] {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let text = format!("zrt-ccl-{:x}-{nanos:x}-{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut name = [0; NAME];
    name[..text.len().min(NAME)].copy_from_slice(&text.as_bytes()[..text.len().min(NAME)]);
    name
}

fn listen(name: &[u8; NAME]) -> Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

fn connect(name: &[u8]) -> Result<UnixStream> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    prepare(stream)
}

fn prepare(stream: UnixStream) -> Result<UnixStream> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok(stream)
}

fn aborted() -> Error {
    Error::new(ErrorKind::ConnectionAborted, "aborted")
}

fn is_tick(e: &Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Reads all of these bytes, unless `stop` says so first.
pub fn read_all(mut stream: &UnixStream, mut to: &mut [u8], stop: &dyn Fn() -> bool) -> Result<()> {
    while !to.is_empty() {
        match stream.read(to) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => to = &mut to[n..],
            Err(e) if is_tick(&e) && !stop() => {}
            Err(e) if is_tick(&e) => return Err(aborted()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of these bytes, unless `stop` says so first.
pub fn write_all(mut stream: &UnixStream, mut from: &[u8], stop: &dyn Fn() -> bool) -> Result<()> {
    while !from.is_empty() {
        match stream.write(from) {
            Ok(n) => from = &from[n..],
            Err(e) if is_tick(&e) && !stop() => {}
            Err(e) if is_tick(&e) => return Err(aborted()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Makes a unique id, and the thread that ranks join at.
pub fn unique_id() -> Result<[u8; ID_BYTES]> {
    let name = fresh_name();
    let listener = listen(&name)?;
    std::thread::Builder::new().name("ccl bootstrap".into()).spawn(move || {
        if let Err(e) = coordinate(&listener) {
            eprintln!("emulated collectives: ranks could not be joined: {e}");
        }
    })?;
    let mut id = [0; ID_BYTES];
    id[..NAME].copy_from_slice(&name);
    Ok(id)
}

/// Gathers all ranks and tells each where the others are, or that they do not fit together.
fn coordinate(listener: &UnixListener) -> Result<()> {
    let mut joined: Vec<(usize, [u8; NAME], UnixStream)> = Vec::new();
    let mut expected = usize::MAX;
    while joined.len() < expected {
        let (stream, _) = listener.accept()?;
        let mut hello = [0; 16 + NAME];
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        // Whoever ends before it has said who it is was no rank.
        if read_all(&stream, &mut hello, &|| true).is_err() {
            continue;
        }
        let number = |at: usize| u64::from_le_bytes(hello[at..at + 8].try_into().unwrap_or_default()) as usize;
        let (ranks, rank) = (number(0), number(8));
        let fits = rank < ranks && (expected == usize::MAX || expected == ranks) && joined.iter().all(|(r, ..)| *r != rank);
        if !fits {
            for (_, _, other) in joined.iter().chain([&(rank, [0; NAME], stream)]) {
                write_all(other, &[1], &|| true)?;
            }
            return Ok(());
        }
        expected = ranks;
        let mut name = [0; NAME];
        name.copy_from_slice(&hello[16..]);
        joined.push((rank, name, stream));
    }
    joined.sort_by_key(|(rank, ..)| *rank);
    let names: Vec<u8> = joined.iter().flat_map(|(_, name, _)| *name).collect();
    for (_, _, stream) in &joined {
        // One that is gone meanwhile is missed by its peers.
        let _ = write_all(stream, &[&[0], names.as_slice()].concat(), &|| true);
    }
    Ok(())
}

/// Joins the ranks of `id`; the sockets to the others by rank.
///
/// # Errors
/// A result code.
pub fn join(id: &[u8; ID_BYTES], ranks: usize, rank: usize, stop: &dyn Fn() -> bool) -> std::result::Result<Vec<Option<UnixStream>>, i32> {
    let system = |_: Error| result::SYSTEM;
    let remote = |_: Error| result::REMOTE;
    let name = fresh_name();
    let listener = listen(&name).map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let root = connect(&id[..NAME]).map_err(remote)?;
    let hello = [&(ranks as u64).to_le_bytes()[..], &(rank as u64).to_le_bytes(), &name].concat();
    write_all(&root, &hello, stop).map_err(remote)?;
    let mut refused = [0];
    read_all(&root, &mut refused, stop).map_err(remote)?;
    if refused != [0] {
        return Err(result::INVALID_ARGUMENT);
    }
    let mut names = vec![0; ranks * NAME];
    read_all(&root, &mut names, stop).map_err(remote)?;
    let mut peers: Vec<Option<UnixStream>> = (0..ranks).map(|_| None).collect();
    for (peer, name) in names.chunks(NAME).enumerate().take(rank) {
        let stream = connect(name).map_err(remote)?;
        write_all(&stream, &(rank as u64).to_le_bytes(), stop).map_err(remote)?;
        peers[peer] = Some(stream);
    }
    for _ in rank + 1..ranks {
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break prepare(stream).map_err(system)?,
                Err(e) if is_tick(&e) && !stop() => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return Err(result::REMOTE),
            }
        };
        let mut number = [0; 8];
        read_all(&stream, &mut number, stop).map_err(remote)?;
        let slot = peers.get_mut(u64::from_le_bytes(number) as usize).ok_or(result::SYSTEM)?;
        *slot = Some(stream);
    }
    Ok(peers)
}

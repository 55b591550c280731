//! How do two ends of a connection trust each other? A mutual challenge and response over the job's secret, then frames that
//! each carry an HMAC over (sequence number, length, payload) under a key of this session and direction.
//!
//! ```text
//! client -> server   magic, client nonce
//! server -> client   server nonce, HMAC(secret, "server", nonces)
//! client -> server   HMAC(secret, "client", nonces)
//! server -> client   first frame: "welcome"
//! ```
//!
//! The labels differ by direction, so an answer cannot be reflected; the nonces are fresh, so a recorded session cannot be
//! replayed; the sequence number stops repeated, dropped and reordered frames. Nothing is encrypted: the store holds no secrets,
//! and by default it listens on the loopback address alone.

use super::fail;
use super::secret::{Secret, random_bytes};
use crate::Result;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Most payload bytes of one frame.
pub(super) const MAX_FRAME_BYTES: usize = 16 << 20;
const MAGIC: &[u8; 8] = b"zrt-st01";
const TAG_BYTES: usize = 32;
const WELCOME: &[u8] = b"welcome";
/// A peer that began a frame must end it within this time.
const FRAME_SECS: Duration = Duration::from_secs(30);

fn mac(key: &[u8; 32], label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC pads a key with zeros to the block of its hash; padded here, no length can be wrong.
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    let mut mac = Hmac::<Sha256>::new(&block.into());
    mac.update(&[label.len() as u8]);
    mac.update(label);
    for part in parts {
        mac.update(part);
    }
    mac
}

fn digest(key: &[u8; 32], label: &[u8], parts: &[&[u8]]) -> [u8; TAG_BYTES] {
    mac(key, label, parts).finalize().into_bytes().into()
}

/// An authenticated connection.
pub(super) struct Link {
    stream: TcpStream,
    send_key: [u8; 32],
    send_sequence: u64,
    receive_key: [u8; 32],
    receive_sequence: u64,
}

/// Reads exactly `bytes.len()` bytes before `until`. `Ok(false)`: the peer closed before the first byte.
fn read_until(stream: &mut TcpStream, bytes: &mut [u8], until: Option<Instant>) -> std::io::Result<bool> {
    let mut have = 0;
    while have < bytes.len() {
        let left = until.map(|u| u.saturating_duration_since(Instant::now()));
        if left.is_some_and(|l| l.is_zero()) {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(left)?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) if have == 0 => return Ok(false),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Writes all bytes before `until`: a peer that does not read must not hold us for ever.
fn write_until(stream: &mut TcpStream, mut bytes: &[u8], until: Instant) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn io<T>(what: &str, result: std::io::Result<T>) -> Result<T> {
    result.or_else(|e| fail(format!("{what}: {e}")))
}

fn expect(what: &str, result: std::io::Result<bool>) -> Result<()> {
    match io(what, result)? {
        true => Ok(()),
        false => fail(format!("{what}: the other side closed the connection")),
    }
}

impl Link {
    fn new(stream: TcpStream, secret: &Secret, nonces: [&[u8]; 2], server: bool) -> Link {
        let up = digest(secret.bytes(), b"to server", &nonces);
        let down = digest(secret.bytes(), b"to client", &nonces);
        let (send_key, receive_key) = if server { (down, up) } else { (up, down) };
        Link { stream, send_key, send_sequence: 0, receive_key, receive_sequence: 0 }
    }

    /// The server's side. A stranger learns a nonce and an HMAC, and is gone by `until`.
    pub fn accept(mut stream: TcpStream, secret: &Secret, until: Instant) -> Result<Link> {
        let mut hello = [0; 40];
        expect("handshake", read_until(&mut stream, &mut hello, Some(until)))?;
        if &hello[..8] != MAGIC {
            return fail("handshake: the client does not speak this protocol".to_string());
        }
        let (client, server) = (&hello[8..], random_bytes()?);
        let proof = digest(secret.bytes(), b"server", &[client, &server]);
        io("handshake", write_until(&mut stream, &[&server[..], &proof].concat(), until))?;
        let mut answer = [0; TAG_BYTES];
        expect("handshake", read_until(&mut stream, &mut answer, Some(until)))?;
        if mac(secret.bytes(), b"client", &[client, &server]).verify_slice(&answer).is_err() {
            return fail("handshake: the client does not know this job's secret".to_string());
        }
        let mut link = Link::new(stream, secret, [client, &server], true);
        link.send(WELCOME)?;
        Ok(link)
    }

    /// The client's side. `Ok(None)`: the server closed before its first word, since it has enough handshakes in hand.
    pub fn connect(mut stream: TcpStream, secret: &Secret, until: Instant) -> Result<Option<Link>> {
        let client = random_bytes()?;
        let mut reply = [0; 32 + TAG_BYTES];
        let sent = write_until(&mut stream, &[&MAGIC[..], &client].concat(), until);
        match sent.and_then(|()| read_until(&mut stream, &mut reply, Some(until))) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return Ok(None),
            Err(e) => return fail(format!("handshake: {e}")),
        }
        let (server, proof) = reply.split_at(32);
        if mac(secret.bytes(), b"server", &[&client, server]).verify_slice(proof).is_err() {
            return fail("handshake: the server does not know this job's secret; another job listens on this port".to_string());
        }
        let answer = digest(secret.bytes(), b"client", &[&client, server]);
        io("handshake", write_until(&mut stream, &answer, until))?;
        let mut link = Link::new(stream, secret, [&client, server], false);
        match link.receive(Some(until))? {
            Some(text) if text == WELCOME => Ok(Some(link)),
            _ => fail("handshake: the server did not welcome this client".to_string()),
        }
    }

    /// Sends one frame.
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        if payload.len() > MAX_FRAME_BYTES {
            return fail(format!("a message has {} bytes, expected at most {MAX_FRAME_BYTES}", payload.len()));
        }
        let head = (payload.len() as u32).to_le_bytes();
        let tag = digest(&self.send_key, b"frame", &[&self.send_sequence.to_le_bytes(), &head, payload]);
        self.send_sequence += 1;
        io("sending", write_until(&mut self.stream, &[&head[..], payload, &tag].concat(), Instant::now() + FRAME_SECS))
    }

    /// Receives one frame that begins before `until`; `None` when the peer closed between frames.
    pub fn receive(&mut self, until: Option<Instant>) -> Result<Option<Vec<u8>>> {
        let mut head = [0; 4];
        if !io("receiving", read_until(&mut self.stream, &mut head[..1], until))? {
            return Ok(None);
        }
        let until = Some(Instant::now() + FRAME_SECS);
        expect("receiving", read_until(&mut self.stream, &mut head[1..], until))?;
        let bytes = u32::from_le_bytes(head) as usize;
        if bytes > MAX_FRAME_BYTES {
            return fail(format!("a frame announces {bytes} bytes, expected at most {MAX_FRAME_BYTES}; the connection is closed"));
        }
        let mut frame = vec![0; bytes + TAG_BYTES];
        expect("receiving", read_until(&mut self.stream, &mut frame, until))?;
        let (payload, tag) = frame.split_at(bytes);
        let wanted = mac(&self.receive_key, b"frame", &[&self.receive_sequence.to_le_bytes(), &head, payload]);
        if wanted.verify_slice(tag).is_err() {
            return fail("a frame is garbled, repeated or not from this job; the connection is closed".to_string());
        }
        self.receive_sequence += 1;
        frame.truncate(bytes);
        Ok(Some(frame))
    }

    /// True when the peer has closed its end; looks without waiting.
    pub fn closed(&self) -> bool {
        let look = || -> std::io::Result<bool> {
            self.stream.set_nonblocking(true)?;
            let seen = match self.stream.peek(&mut [0]) {
                Ok(n) => Ok(n == 0),
                Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
                Err(e) => Err(e),
            };
            self.stream.set_nonblocking(false)?;
            seen
        };
        look().unwrap_or(true)
    }
}

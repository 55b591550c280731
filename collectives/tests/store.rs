//! The store: waits with deadlines, many clients, and a port that strangers can neither read, write nor replay on.

mod common;

use common::LONG;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use zrt_collectives::store::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use zrt_collectives::{MemoryStore, Secret, ServerOptions, Store, TcpStore, TcpStoreServer};

const SHORT: Duration = Duration::from_millis(50);

fn server(secret: &Secret) -> TcpStoreServer {
    TcpStoreServer::start(secret.clone(), ServerOptions::default()).unwrap()
}

fn text<T>(result: zrt_collectives::Result<T>) -> String {
    result.err().unwrap().to_string()
}

/// The same body for both stores.
fn behaves(store: &dyn Store) {
    assert!(!store.check(&["a"]).unwrap());
    assert!(text(store.get("a", SHORT)).contains("'a' was not set within"));
    store.set("a", b"one").unwrap();
    store.set("a", b"two").unwrap();
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("a", SHORT).unwrap(), b"two");
    assert_eq!(store.get("empty", SHORT).unwrap(), b"");
    assert!(store.check(&["a", "empty"]).unwrap());
    assert!(!store.check(&["a", "b"]).unwrap());
    assert!(text(store.wait(&["a", "b"], SHORT)).contains("'b'"));
    assert_eq!(store.add("count", 5).unwrap(), 5);
    assert_eq!(store.add("count", -7).unwrap(), -2);
    assert_eq!(store.get("count", SHORT).unwrap(), b"-2");
    assert!(text(store.add("a", 1)).contains("no number"));
    store.set("count", i64::MAX.to_string().as_bytes()).unwrap();
    assert!(text(store.add("count", 1)).contains("range of i64"));
    assert!(store.delete("a").unwrap());
    assert!(!store.delete("a").unwrap());
    assert!(!store.check(&["a"]).unwrap());

    assert!(text(store.set("", b"")).contains("key has 0 bytes"));
    assert!(text(store.set(&"k".repeat(MAX_KEY_BYTES + 1), b"")).contains("key has"));
    assert!(text(store.set("big", &vec![0; MAX_VALUE_BYTES + 1])).contains("value of 'big'"));
    let big: Vec<u8> = (0..MAX_VALUE_BYTES).map(|i| i as u8).collect();
    store.set("big", &big).unwrap();
    assert!(store.get("big", LONG).unwrap() == big);
    let many: Vec<String> = (0..2000).map(|i| i.to_string()).collect();
    assert!(text(store.check(&many.iter().map(|k| &k[..]).collect::<Vec<_>>())).contains("2000 keys"));

    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.wait(&["x", "y"], LONG));
        let gets = scope.spawn(|| store.get("y", Duration::MAX));
        store.set("x", b"1").unwrap();
        store.set("y", b"2").unwrap();
        waits.join().unwrap().unwrap();
        assert_eq!(gets.join().unwrap().unwrap(), b"2");
    });
}

#[test]
fn memory_store_behaves() {
    behaves(&MemoryStore::new());
}

#[test]
fn tcp_store_behaves() {
    let secret = Secret::random().unwrap();
    let server = server(&secret);
    let client = TcpStore::connect(server.address(), secret, LONG).unwrap();
    behaves(&client);
    client.set("seen", b"by the owner").unwrap();
    assert_eq!(server.store().list("see"), [("seen".to_string(), b"by the owner".to_vec())]);
}

#[test]
fn the_whole_store_has_a_limit() {
    let store = MemoryStore::new();
    let value = vec![0; MAX_VALUE_BYTES];
    let set = |i: usize| store.set(&format!("k{i}"), &value);
    let full = (0..100).map(set).find(|r| r.is_err()).unwrap();
    assert!(text(full).contains("delete old keys"));
    store.delete("k0").unwrap();
    store.set("k0", b"fits").unwrap();
}

#[test]
fn many_clients_count_together() {
    let secret = Secret::random().unwrap();
    let server = server(&secret);
    std::thread::scope(|scope| {
        for rank in 0..40 {
            let (secret, address) = (secret.clone(), server.address());
            scope.spawn(move || {
                let client = TcpStore::connect(address, secret, LONG).unwrap();
                client.set(&format!("rank {rank}"), &[rank]).unwrap();
                for _ in 0..10 {
                    client.add("count", 1).unwrap();
                }
                let keys: Vec<String> = (0..40).map(|r| format!("rank {r}")).collect();
                client.wait(&keys.iter().map(|k| &k[..]).collect::<Vec<_>>(), LONG).unwrap();
            });
        }
    });
    assert_eq!(server.store().get("count", SHORT).unwrap(), b"400");
}

#[test]
fn a_used_port_is_a_clear_error() {
    let secret = Secret::random().unwrap();
    let first = server(&secret);
    let options = ServerOptions { port: first.address().port(), ..ServerOptions::default() };
    let error = text(TcpStoreServer::start(secret, options));
    assert!(error.contains("is in use") && error.contains("choose another port, or port 0"), "{error}");
    assert_eq!(first.address().ip(), Ipv4Addr::LOCALHOST, "the world cannot reach it unless asked");
}

#[test]
fn a_wrong_secret_is_refused_at_once() {
    let server = server(&Secret::random().unwrap());
    let begun = Instant::now();
    let error = text(TcpStore::connect(server.address(), Secret::random().unwrap(), LONG));
    assert!(error.contains("does not know this job's secret"), "{error}");
    assert!(begun.elapsed() < LONG / 2, "no use in trying again");
}

#[test]
fn nobody_listens_and_the_server_ends() {
    let secret = Secret::random().unwrap();
    // The port of a connected socket: nobody listens on it, and no other test can be given it meanwhile.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let held = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let error = text(TcpStore::connect(held.local_addr().unwrap(), secret.clone(), Duration::from_millis(200)));
    assert!(error.contains("is the launcher running?"), "{error}");
    let server = server(&secret);
    let client = TcpStore::connect(server.address(), secret, LONG).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.get("never", LONG));
        std::thread::sleep(SHORT);
        drop(server);
        assert!(waiting.join().unwrap().is_err(), "ended with the server, not with the deadline");
    });
}

/// A stranger's bytes never change the store, whatever they are.
#[test]
fn strangers_are_turned_away() {
    let secret = Secret::random().unwrap();
    let options = ServerOptions { handshake_timeout: Duration::from_secs(1), ..ServerOptions::default() };
    let server = TcpStoreServer::start(secret.clone(), options).unwrap();
    let ended = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(LONG)).unwrap();
        // The server closes: an end or a reset, but no time-out.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).map(|_| ()).or_else(|e| match e.kind() {
            std::io::ErrorKind::ConnectionReset => Ok(()),
            _ => Err(e),
        })
    };
    let connect = || TcpStream::connect(server.address()).unwrap();
    // Another protocol.
    let mut stream = connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n0123456789").unwrap();
    ended(stream).unwrap();
    // The right words, without the secret.
    let mut stream = connect();
    stream.write_all(b"zrt-st01").unwrap();
    stream.write_all(&[7; 32]).unwrap();
    let mut challenge = [0; 64];
    stream.read_exact(&mut challenge).unwrap();
    // Reflecting the server's proof does not help: the labels differ.
    stream.write_all(&challenge[32..]).unwrap();
    ended(stream).unwrap();
    // Says nothing, and says a little and stops: gone by the handshake's deadline.
    ended(connect()).unwrap();
    let mut stream = connect();
    stream.write_all(b"zrt-").unwrap();
    ended(stream).unwrap();
    assert!(server.store().list("").is_empty());
    TcpStore::connect(server.address(), secret, LONG).unwrap().set("works", b"still").unwrap();
}

#[test]
fn waiting_strangers_do_not_keep_the_job_out() {
    let secret = Secret::random().unwrap();
    let options = ServerOptions { handshake_timeout: Duration::from_secs(1), max_handshakes: 4, ..ServerOptions::default() };
    let server = TcpStoreServer::start(secret.clone(), options).unwrap();
    let strangers: Vec<_> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    TcpStore::connect(server.address(), secret, LONG).unwrap().set("a", b"1").unwrap();
    drop(strangers);
}

fn forward(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}

/// A man in the middle who lets the handshake and the first `pass` frames of the client through and then sends what `change` makes
/// of the next one. Returns the proxy's address.
fn middle(server: SocketAddr, pass: usize, change: fn(Vec<u8>) -> Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut up) = (client.unwrap(), TcpStream::connect(server).unwrap());
            forward(up.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut hello = [0; 40 + 32];
                client.read_exact(&mut hello[..40])?;
                up.write_all(&hello[..40])?;
                client.read_exact(&mut hello[40..])?;
                up.write_all(&hello[40..])?;
                for number in 0.. {
                    let mut frame = vec![0; 4];
                    client.read_exact(&mut frame)?;
                    let bytes = u32::from_le_bytes(frame[..].try_into().unwrap()) as usize;
                    frame.resize(4 + bytes + 32, 0);
                    client.read_exact(&mut frame[4..])?;
                    up.write_all(&if number == pass { change(frame) } else { frame })?;
                }
                Ok(())
            });
        }
    });
    address
}

#[test]
fn garbled_repeated_and_oversize_frames_end_the_connection() {
    let secret = Secret::random().unwrap();
    let garble = |mut frame: Vec<u8>| {
        frame[6] ^= 1;
        frame
    };
    let repeat = |frame: Vec<u8>| [&frame[..], &frame].concat();
    let oversize = |_: Vec<u8>| [0xff; 100].to_vec();
    for (change, counted) in [(garble as fn(Vec<u8>) -> Vec<u8>, 1), (repeat, 2), (oversize, 1)] {
        let server = server(&secret);
        let client = TcpStore::connect(middle(server.address(), 1, change), secret.clone(), LONG).unwrap();
        assert_eq!(client.add("count", 1).unwrap(), 1);
        // The second call is tampered with: refused, or, when repeated, counted once and its copy refused.
        let second = client.add("count", 1);
        let third = client.add("count", 0);
        assert!(second.is_err() || third.is_err(), "the connection went on after a bad frame");
        assert_eq!(server.store().get("count", SHORT).unwrap(), counted.to_string().as_bytes());
    }
}

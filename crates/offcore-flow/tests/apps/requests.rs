//! HTTP requests of any content to the file server.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use offcore_flow::host::apps::http::FileServer;
use offcore_tcp::proto::Config;

use crate::script::Script;
use crate::world::{Client, World};

const PORT: u16 = 80;
/// Maximum number of steps of a script.
const STEPS: usize = 80;
/// The content of a file outside of the served directory.
const SECRET: &[u8] = b"this file is not served";
const PIECES: [&str; 32] = [
    "GET / HTTP/1.1\r\n",
    "GET /short HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET /long HTTP/1.0\r\n\r\n",
    "HEAD /short HTTP/1.1\r\n",
    "POST /short HTTP/1.1\r\n",
    "Host: a\r\n",
    "\r\n",
    "\n",
    "\r",
    " ",
    "/../secret",
    "/%2e%2e/secret",
    "/..%2fsecret",
    "//short",
    "/short%00",
    "GET ",
    "GET /short",
    " HTTP/1.1\r\n",
    " HTTP/9.9\r\n",
    "Connection: close\r\n",
    "Connection: keep-alive\r\n",
    "Content-Length: 5\r\n",
    "Content-Length: -1\r\n",
    "Content-Length: 99999999999999999999\r\n",
    "Transfer-Encoding: chunked\r\n",
    "5\r\nhello\r\n0\r\n\r\n",
    "ffffffffffffffff\r\n",
    "Range: bytes=0-3\r\n",
    "Range: bytes=9-1,-5,99999999999-\r\n",
    "If-Modified-Since: Thu, 01 Jan 1970 00:00:00 GMT\r\n",
    ": nameless\r\n",
    "Expect: 100-continue\r\n",
];

/// The results of scripts: answers with status 200, other answers, and connections that the server ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) served: u64,
    pub(crate) refused: u64,
    pub(crate) ended: u64,
}

/// A server of a directory with two files.
struct Server {
    world: World<FileServer>,
    directory: PathBuf,
}

impl Server {
    fn new() -> Self {
        let thread = std::thread::current().id();
        let name = format!("offcore-requests-{}-{thread:?}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let site = directory.join("site");
        fs::create_dir_all(&site).unwrap();
        fs::write(directory.join("secret"), SECRET).unwrap();
        fs::write(site.join("short"), "0123456789").unwrap();
        fs::write(site.join("long"), vec![b'x'; 300_000]).unwrap();
        let app = FileServer::new(&site, PORT).unwrap();
        Self { world: World::new(app, Config::default()), directory }
    }

    /// Sends a whole request for the short file, and reads the answer.
    fn check(&mut self) {
        let world = &mut self.world;
        let mut client = world.connect(PORT);
        world.write(&mut client, b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n");
        let mut answer = Vec::new();
        world.run_until(10, |world| {
            answer.extend(world.read(&mut client, usize::MAX));
            answer.ends_with(b"0123456789")
        });
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n") && answer.ends_with(b"0123456789"));
        self.end(&client);
    }

    /// Resets a client's connection, and waits until the server has freed it.
    fn end(&mut self, client: &Client) {
        let world = &mut self.world;
        let (stack, out) = world.client.path.call();
        stack.abort(world.now, client.conn, out);
        let freed = world.run_until(60, |world| world.server.path.stack.connections() == 0);
        assert!(freed.is_some(), "{} connections", world.server.path.stack.connections());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

thread_local! {
    static SERVER: RefCell<Option<Server>> = const { RefCell::new(None) };
}

/// Plays a script on a connection and adds the results. Afterwards the server has freed the connection and answers
/// another one.
pub(crate) fn play(bytes: &[u8], outcome: &mut Outcome) {
    // After a failed script, the next one gets a new server.
    let mut server = SERVER.take().unwrap_or_else(Server::new);
    play_with(&mut server, Script(bytes), outcome);
    SERVER.set(Some(server));
}

fn play_with(server: &mut Server, mut script: Script<'_>, outcome: &mut Outcome) {
    let world = &mut server.world;
    world.events.clear();
    let mut client = world.connect(PORT);
    let mut answers = Vec::new();
    for _ in 0..STEPS {
        if script.0.is_empty() || world.is_closed(&client) {
            break;
        }
        match script.u8() {
            0..40 => {
                world.write(&mut client, PIECES[1].as_bytes());
            }
            40..200 => {
                let piece = PIECES[script.below(PIECES.len())];
                world.write(&mut client, piece.as_bytes());
            }
            200..220 => {
                let len = usize::from(script.u8());
                let bytes: Vec<u8> = (0..len).map(|_| script.u8()).collect();
                world.write(&mut client, &bytes);
            }
            220..235 => world.run(0.02),
            235..250 => answers.extend(world.read(&mut client, 1 << script.below(20))),
            _ => {
                let (stack, out) = world.client.path.call();
                let _ = stack.shutdown(world.now, client.conn, out);
                break;
            }
        }
    }
    world.run(0.1);
    if !world.is_closed(&client) {
        answers.extend(world.read(&mut client, usize::MAX));
    }
    outcome.ended += u64::from(world.has_ended(&client) || world.is_closed(&client));
    let first = b"HTTP/1.1 ";
    assert!(
        answers[..answers.len().min(first.len())] == first[..answers.len().min(first.len())],
        "{answers:?}"
    );
    assert!(!answers.windows(SECRET.len()).any(|window| window == SECRET), "the file beside the directory");
    let count = |text: &[u8]| answers.windows(text.len()).filter(|window| *window == text).count() as u64;
    let served = count(b"HTTP/1.1 200");
    outcome.served += served;
    outcome.refused += count(b"HTTP/1.1 ") - served;
    server.end(&client);
    server.check();
}

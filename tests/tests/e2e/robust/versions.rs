//! Two stacks at one path, and a stack of another version.

use std::path::Path;
use std::process::{Command, Output};
use std::thread;

use offcore_session::message::{Hello, VERSION, Welcome};
use peers::{Need, TempDir, offcore, require};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, send, socket,
};

use super::super::programs::on_stack::Stack;
use super::NEEDS;

#[test]
fn a_second_stack_at_a_path_names_the_first() {
    let Some(()) = require(&NEEDS) else { return };
    let stack = Stack::new("second");
    let args = ["tcp", "--port", "af_packet:t0,addr=10.99.0.9/24", "--serve", &stack.socket];
    let finished = offcore::Offcore::start_in(stack.link.here(), &args).unwrap().wait().unwrap();
    assert!(!finished.status.success(), "{finished:?}");
    let said = &finished.stderr;
    let process = format!("process {}", stack.stack.id());
    for part in ["another stack", &process, &stack.socket, "another path"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // The first stack still serves.
    assert_eq!(stack.run("slow", &["little"]), [""; 0]);
    assert!(stack.finish().status.success());
}

/// Replies to successive processes that attach at a path as stacks of these versions do. Further processes get the last
/// reply.
fn pretend(path: &Path, versions: &[u32]) {
    let door = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&door, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&door, 8).unwrap();
    let last = *versions.last().unwrap();
    let versions = versions.to_vec();
    thread::spawn(move || {
        for version in versions.into_iter().chain(std::iter::repeat(last)) {
            let process = accept(&door).unwrap();
            let (len, _) = recv(&process, &mut [0; 256][..], RecvFlags::empty()).unwrap();
            assert_eq!(len, Hello::LEN);
            let welcome = Welcome { version, owner: 1, pid: 1, gate: 1, ..Welcome::default() };
            let bytes = welcome.to_bytes();
            // Only the first words of another version's message are defined.
            let len = if version == VERSION { bytes.len() } else { 8 };
            send(&process, &bytes[..len], SendFlags::NOSIGNAL).unwrap();
        }
    });
}

fn exec(path: &Path) -> Output {
    let mut command = Command::new(offcore::binary().unwrap());
    command.args(["exec", "--stack"]).arg(path).args(["--", "curl", "--silent", "--max-time", "5"]);
    command.arg("http://192.0.2.1/").output().unwrap()
}

#[test]
fn version_mismatch_names_both_versions() {
    let Some(()) = require(&[Need::Curl]) else { return };
    let dir = TempDir::new().unwrap();
    let theirs = VERSION + 7;
    // The command detects it before it starts the program. The library detects it if the stack was replaced in between.
    for (versions, what) in [(&[theirs][..], "program"), (&[VERSION, theirs], "library")] {
        let path = dir.file(what);
        pretend(&path, versions);
        let output = exec(&path);
        let said = String::from_utf8_lossy(&output.stderr);
        let expected =
            format!("has version {theirs}, this {what} has version {VERSION}: use the same build of both");
        assert!(said.contains(&expected) && said.contains(path.to_str().unwrap()), "{expected}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!output.status.success());
    }
}

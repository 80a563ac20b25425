//! OpenSSH's server on the stack: it executes itself for each connection, changes root and user, and drops its
//! privileges.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::process::{Command, Stdio};

use peers::Need;

use super::super::tcp::content;
use super::{STACK, Stage};

const PORT: u16 = 2222;

fn key(stage: &Stage, name: &str) -> String {
    let path = stage.path(name);
    stage.run_beside(&["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &path]);
    path
}

/// Returns an `ssh` command that runs a command as root.
fn ssh(stage: &Stage, key: &str, address: &str, words: &str) -> Command {
    let mut command = stage.netns.command("ssh");
    command.args(["-F", "none", "-i", key, "-p", &PORT.to_string(), "-o", "BatchMode=yes"]);
    command.args([
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "LogLevel=ERROR",
    ]);
    command.args(["-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=20"]);
    command.args([&format!("root@{address}"), words]);
    command
}

#[test]
fn logins_and_copies() {
    let Some(stage) = Stage::new(&[Need::Ssh]) else { return };
    let (host, user) = (key(&stage, "host"), key(&stage, "user"));
    let allowed = stage.write("allowed", fs::read(format!("{user}.pub")).unwrap());
    fs::set_permissions(&allowed, fs::Permissions::from_mode(0o600)).unwrap();
    // The directory for the server's chroot, which Debian's service creates.
    let _ = DirBuilder::new().mode(0o755).create("/run/sshd");
    let conf = stage.write(
        "sshd.conf",
        format!(
            "Port {PORT}
            HostKey {host}
            AuthorizedKeysFile {allowed}
            StrictModes no
            UsePAM no
            PasswordAuthentication no
            PermitRootLogin yes
            PidFile none
            LogLevel VERBOSE
            "
        ),
    );
    let sshd = fs::canonicalize("/usr/sbin/sshd").unwrap().display().to_string();
    let server = stage.start(&[&sshd, "-D", "-e", "-f", &conf]);
    stage.wait_listening(STACK[0], PORT, &server);
    for address in [STACK[0], STACK[1], "127.0.0.1"] {
        let output = ssh(&stage, &user, address, "echo $((6 * 7)); exit 3").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{address}: {said}{}", server.tail());
        assert_eq!(output.stdout, b"42\n");
    }
    let bytes = content(5, 5_000_000);
    let file = stage.write("file", &bytes);
    let there = stage.path("there");
    let up = ssh(&stage, &user, STACK[0], &format!("cat > {there}"))
        .stdin(File::open(&file).unwrap())
        .stdout(Stdio::null())
        .status();
    assert!(up.unwrap().success(), "{}", server.tail());
    assert!(fs::read(&there).unwrap() == bytes);
    let down = ssh(&stage, &user, STACK[0], &format!("cat {there}")).output().unwrap();
    assert!(down.stdout == bytes, "{} bytes: {}", down.stdout.len(), server.tail());
}

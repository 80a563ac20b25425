//! The directory `/run/offcore`. Each test has its own `/run`.

use std::process::{Command, Output};

use peers::{Need, TempDir, offcore, require};

/// Runs a script whose `/run` is initially empty. `$offcore` is the binary, `$dir` is a directory of the test.
fn with_own_run(dir: &TempDir, script: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "sh", "-c"]);
    command.arg(format!("set -e; mount -t tmpfs none /run; {script}"));
    command.env("offcore", offcore::binary().unwrap()).env("dir", dir.path());
    command.output().unwrap()
}

/// Runs a script that must succeed. Returns its output.
fn printed(dir: &TempDir, script: &str) -> String {
    let output = with_own_run(dir, script);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Another build's library is removed when it has not been used for a long time, but not while a process has it open or
/// it is new.
#[test]
fn old_libraries_are_removed() {
    let Some(()) = require(&[Need::Root, Need::Cc]) else { return };
    let dir = TempDir::new().unwrap();
    let script = "umask 077; mkdir -m 755 /run/offcore; cd /run/offcore
        echo 'int x;' | cc -shared -fPIC -x c -o preload-mapped.so -
        cp preload-mapped.so preload-old.so; cp preload-mapped.so preload-young.so
        touch preload-1.new preload-2.new other.so
        touch -d '2 days ago' preload-mapped.so preload-old.so preload-1.new other.so
        LD_PRELOAD=$PWD/preload-mapped.so sleep 60 & mapped=$!
        until grep -q preload-mapped /proc/$mapped/maps; do sleep 0.05; done
        \"$offcore\" exec --stack /nowhere true 2>/dev/null || [ $? = 1 ]
        kill $mapped
        ls";
    let left = printed(&dir, script);
    let (ours, others): (Vec<&str>, _) =
        left.lines().partition(|name| name.len() == "preload-0123456789abcdef.so".len());
    assert_eq!(others, ["other.so", "preload-2.new", "preload-mapped.so", "preload-young.so"]);
    assert_eq!(ours.len(), 1, "{left}");
}

/// Files that a process with the same ID has left do not cause failures. In containers, processes often have the same
/// ID.
#[test]
fn partial_library_files_are_ignored() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    let script = "mkdir -m 755 /run/offcore; cd /run/offcore
        for n in $(seq 1 3000); do echo preload-$n-0.new preload-$n.new; done | xargs touch
        unshare --pid --fork \"$offcore\" exec --stack /nowhere true 2>\"$dir/said\" || [ $? = 1 ]
        cat \"$dir/said\"; ls preload-*.so | wc -l";
    let said = printed(&dir, script);
    assert!(said.contains("no stack at /nowhere") && said.ends_with("\n1\n"), "{said}");
}

/// Root in a user namespace uses the directory of the outer user. If a directory belongs to another user, the message
/// names it with usable advice, and the home directory is used instead if it exists.
#[test]
fn root_of_a_user_namespace() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    let script = "chmod 1777 \"$dir\"; export TMPDIR=\"$dir\"; mkdir -m 755 \"$dir/offcore-0\"
        root() { setpriv --reuid 1234 --regid 1234 --clear-groups unshare --user --map-root-user \
            \"$offcore\" exec --stack /nowhere true 2>&1 || [ $? = 1 ]; }
        root; stat -c %u \"$dir/offcore-1234\"
        rm -r \"$dir/offcore-1234\"; mkdir -m 755 \"$dir/offcore-1234\"; root
        mkdir -m 755 \"$dir/home\"; chown 1234 \"$dir/home\"; export HOME=\"$dir/home\"; root; ls \"$HOME/.offcore\" | wc -l";
    let said = printed(&dir, script);
    let [first, owner, second, third, libraries] = said.lines().collect::<Vec<_>>()[..] else {
        panic!("{said}")
    };
    assert!(first.contains("no stack at /nowhere") && owner == "1234", "{said}");
    assert!(second.contains("offcore-1234: found a directory of user 65534, expected a directory of user 0"));
    assert!(second.contains("set TMPDIR to a directory of your own") && !second.contains("remove it"));
    assert!(third.contains("no stack at /nowhere") && libraries == "1", "{said}");
}

/// A stack creates the default directory, in which programs look for a stack, readable for all users. It creates no
/// other directory.
#[test]
fn a_stack_makes_the_directory() {
    let Some(()) = require(&[Need::Root, Need::Tun]) else { return };
    let dir = TempDir::new().unwrap();
    let script = "umask 077
        \"$offcore\" tcp --port tap:t0,addr=10.78.0.2/24 --idle sleep --serve /run/offcore/stack.sock >/dev/null & stack=$!
        until [ -S /run/offcore/stack.sock ]; do kill -0 $stack; sleep 0.05; done
        stat -c %a /run/offcore
        \"$offcore\" exec echo it runs
        kill $stack; wait $stack; ls /run/offcore | grep -v preload- || true";
    assert_eq!(printed(&dir, script), "755\nit runs\n");
    let output =
        with_own_run(&dir, "exec \"$offcore\" tcp --port tap:t0,addr=10.78.0.2/24 --serve \"$dir/no/s\"");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("/no does not exist: create it, or choose another path") && !said.contains("Usage"),
        "{said}"
    );
    assert!(!dir.file("no").exists());
}

/// Errors at the start of a stack do not print the usage of flags.
#[test]
fn failures_show_no_usage() {
    let Some(()) = require(&[Need::Root, Need::Tun]) else { return };
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.file("file"), "").unwrap();
    for (flags, code, words) in [
        ("tcp --port tap:t0,addr=10.78.0.2/24 --serve $dir/file", 1, "exists and is not a socket"),
        ("exec --port af_packet:none,addr=10.78.0.2/24 true", 1, "there is no interface 'none'"),
        (
            "exec --port tap:t0,addr=10.78.0.2/24 --port tap:t0,addr=10.78.0.3/24 true",
            2,
            "Usage: offcore exec",
        ),
    ] {
        let output = with_own_run(&dir, &format!("exec \"$offcore\" {flags}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {said}");
        assert!(said.contains(words), "{flags}: {said}");
        assert_eq!(said.contains("Usage: "), code == 2, "{flags}: {said}");
        assert!(!said.contains("offcore tcp --port <SPEC>"), "{flags}: {said}");
    }
}

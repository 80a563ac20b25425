//! Redis on the stack.

use std::process::Stdio;

use offcore_bench::peer::process::Process;
use peers::Need;

use super::{STACK, Stage, until};

/// The addresses of a server. Two of them are on the stack.
const ADDRESSES: [&str; 3] = [STACK[0], STACK[1], "127.0.0.1"];

fn start(stage: &Stage, more: &[&str]) -> Process {
    stage.wait_free(STACK[0], 6379);
    let dir = stage.dir.path().display().to_string();
    let own = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::", "--protected-mode", "no"];
    let server = stage.start(&[&own[..], &["--dir", &dir, "--save", ""], more].concat());
    for address in ADDRESSES {
        stage.wait_listening(address, 6379, &server);
    }
    server
}

/// Returns the server's answer to a client on the kernel's stack.
fn ask(stage: &Stage, address: &str, words: &[&str]) -> String {
    let answer = stage.run_beside(&[&["redis-cli", "-h", address, "--raw"], words].concat());
    answer.trim_end().to_owned()
}

#[test]
fn values_and_benchmark() {
    let Some(stage) = Stage::new(&[Need::Redis]) else { return };
    for more in [&[][..], &["--io-threads", "2", "--io-threads-do-reads", "yes"]] {
        let mut server = start(&stage, more);
        let value = "0123456789abcdef".repeat(50_000);
        let file = stage.write("value", &value);
        for address in ADDRESSES {
            let mut set = stage.netns.command("redis-cli");
            set.args(["-h", address, "-x", "SET", "large"]);
            set.stdin(std::fs::File::open(&file).unwrap()).stdout(Stdio::null());
            assert!(set.status().unwrap().success());
            assert!(ask(&stage, address, &["GET", "large"]) == value, "{address}");
            assert_eq!(ask(&stage, address, &["DEL", "large"]), "1");
        }
        let load = ["redis-benchmark", "-h", STACK[0], "-q", "-n", "1500", "-c", "50"];
        for (more, tests) in
            [(&["-t", "set,get,incr,lpush,lrange_100"][..], 6), (&["-P", "16", "-t", "set,get"], 2)]
        {
            let report = stage.run_beside(&[&load[..], more].concat());
            let done = report.matches("requests per second").count();
            assert!(done >= tests && !report.contains("rror"), "{report}");
        }
        // A client on the stack gets an answer, too.
        assert_eq!(stage.run(&["redis-cli", "-h", STACK[0], "PING"]).trim(), "PONG");
        server.signal(peers::offcore::Signal::TERM).unwrap();
        assert!(server.wait_for_exit(super::TIMEOUT).unwrap().success(), "{}", server.tail());
    }
}

#[test]
fn background_save_under_load() {
    let Some(stage) = Stage::new(&[Need::Redis]) else { return };
    let mut server = start(&stage, &[]);
    for key in 0..50 {
        ask(&stage, STACK[0], &["SET", &format!("key{key}"), &format!("value{key}").repeat(1000)]);
    }
    let load =
        ["redis-benchmark", "-h", STACK[0], "-q", "-n", "20000", "-c", "20", "-t", "set", "-r", "1000"];
    for _ in 0..3 {
        let mut load = stage.start_beside(&load);
        let before = ask(&stage, STACK[0], &["INFO", "stats"]);
        assert!(before.contains("total_connections_received"), "{before}");
        assert_eq!(ask(&stage, STACK[0], &["BGSAVE"]), "Background saving started");
        let saved = || {
            let info = ask(&stage, STACK[0], &["INFO", "persistence"]);
            info.contains("rdb_bgsave_in_progress:0") && info.contains("rdb_last_bgsave_status:ok")
        };
        until("the copy", saved, || server.tail());
        let status = load.wait_for_exit(super::TIMEOUT).unwrap();
        assert!(status.success(), "{}", load.tail());
    }
    server.signal(peers::offcore::Signal::TERM).unwrap();
    assert!(server.wait_for_exit(super::TIMEOUT).unwrap().success(), "{}", server.tail());
    let _server = start(&stage, &["--dbfilename", "dump.rdb"]);
    for key in 0..50 {
        let value = ask(&stage, STACK[0], &["GET", &format!("key{key}")]);
        assert_eq!(value, format!("value{key}").repeat(1000));
    }
}

//! `offcore` does no harm: it overwrites no files, takes over no interfaces, leaves nothing behind, and reports errors
//! clearly.

mod wrong;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use peers::offcore::binary;
use peers::{Need, Netns, Offcore, TempDir, require};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};

use crate::switch::{Report, wait_for_report, wait_for_status, wait_until};

/// Returns a capture file with `packets` packets of 100 bytes.
pub(crate) fn capture(packets: usize) -> Vec<u8> {
    let words = |words: [u32; 4]| words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>();
    let mut file = words([0xa1b2_c3d4, 4 << 16 | 2, 0, 0]);
    file.extend([65_535u32, 1].into_iter().flat_map(u32::to_le_bytes));
    for packet in 0..packets {
        file.extend(words([0, 0, 100, 100]));
        file.extend((0..100).map(|byte| (byte + packet) as u8));
    }
    file
}

/// Runs a switch until it ends, for up to a second.
fn switch(args: &[&str]) -> Output {
    let mut command = Command::new(binary().unwrap());
    command.args(["switch", "--mbufs", "4096", "--hugepages", "none", "--duration", "1", "--until-idle"]);
    command.args(args).output().unwrap()
}

/// Asserts the exit code of a run, and that its last message contains all of `words`.
fn assert_ended(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(words.iter().all(|word| last.contains(word)), "{words:?} in {said}");
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn captures_are_not_replaced() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let file = |name: &str| dir.file(name).display().to_string();
    let (input, old) = (capture(5), b"somebody's".to_vec());
    fs::write(file("in"), &input).unwrap();
    fs::write(file("old"), &old).unwrap();
    fs::hard_link(file("in"), file("hard")).unwrap();
    symlink(file("in"), file("soft")).unwrap();
    let before = names(dir.path());
    let from = format!("pcap:{}", file("in"));
    for to in ["in", "hard", "soft"] {
        for more in ["", ",overwrite"] {
            let to = format!("pcap:-,{}{more}", file(to));
            for args in [["--port", &from, "--port", &to], ["--port", &from, "--mirror", &format!("0={to}")]]
            {
                assert_ended(&switch(&args), 1, &["which port 'pcap:", "reads: expected another file"]);
            }
        }
    }
    let onto = |more: &str| {
        ["--port".into(), from.clone(), "--port".into(), format!("pcap:-,{}{more}", file("old"))]
    };
    let run = |args: [String; 4]| switch(&args.each_ref().map(String::as_str));
    assert_ended(&run(onto("")), 1, &["it exists", "'overwrite'"]);
    // The output file of a port that could be opened is removed if another port cannot be opened.
    let missing = format!("pcap:{}", file("missing"));
    let output = switch(&["--port", &format!("pcap:-,{}", file("new")), "--port", &missing]);
    assert_ended(&output, 1, &["missing", "No such file"]);
    assert_eq!(names(dir.path()), before);
    assert_eq!((fs::read(file("in")).unwrap(), fs::read(file("old")).unwrap()), (input.clone(), old.clone()));

    // A killed process leaves its data in a temporary file, and the existing file is unchanged.
    let slow =
        ["switch", "--port", "gen:rate=1k", "--port", &onto(",overwrite")[3], "--stats-interval", "0.1"];
    let mut killed = Offcore::start(&[&slow[..], &["--format", "json"]].concat()).unwrap();
    crate::switch::wait_for_packets(&mut killed, 1, "tx", 10);
    killed.signal(Signal::KILL).unwrap();
    killed.wait().unwrap();
    assert_eq!(fs::read(file("old")).unwrap(), old);
    fs::copy(file("old.part"), file("new.part")).unwrap();
    let left = fs::read(file("new.part")).unwrap();
    let output = switch(&["--port", &from, "--port", &format!("pcap:-,{}", file("new"))]);
    assert_ended(&output, 1, &["new.part' exists", "a run that was killed left it", "'overwrite'"]);
    assert_eq!(fs::read(file("new.part")).unwrap(), left);

    let output = run(onto(",overwrite"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read(file("old")).unwrap().len(), input.len());
    assert!(!dir.file("old.part").exists());
}

#[test]
fn capture_io_errors_are_failures() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    let file = |name: &str| dir.file(name).display().to_string();
    let mut cut = capture(9);
    cut.truncate(cut.len() - 50);
    fs::write(file("cut"), &cut).unwrap();
    let output =
        switch(&["--port", &format!("pcap:{}", file("cut")), "--port", &format!("pcap:-,{}", file("whole"))]);
    assert_ended(&output, 1, &["cut'", "ends within record"]);
    assert_eq!(fs::read(file("whole")).unwrap().len(), capture(8).len());

    fs::create_dir(dir.file("full")).unwrap();
    let full = file("full/out");
    let run = format!(
        "mount -t tmpfs -o size=64k none {} && exec {} switch --mbufs 4096 --hugepages none --duration 1 \
         --port gen:count=9000 --port pcap:-,{full}; ",
        file("full"),
        binary().unwrap().display()
    );
    let output = Command::new("unshare").args(["-m", "sh", "-c", &run]).output().unwrap();
    let part = format!("what was written is in '{full}.part'");
    assert_ended(&output, 1, &["No space left on device", &part]);
}

#[test]
fn overwrite_keeps_other_hard_links() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    let file = |name: &str| dir.file(name).display().to_string();
    // An existing file has the name of the temporary file, and another file is readable only by its owner.
    fs::write(file("precious"), "precious").unwrap();
    fs::hard_link(file("precious"), file("out.part")).unwrap();
    fs::write(file("out"), "old").unwrap();
    fs::set_permissions(file("out"), Permissions::from_mode(0o640)).unwrap();
    chown(file("out"), Some(65_534), Some(65_534)).unwrap();
    let to = format!("pcap:-,{},overwrite", file("out"));
    let output = switch(&["--port", "gen:count=5", "--port", &to]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read(file("precious")).unwrap(), b"precious");
    let found = fs::metadata(file("out")).unwrap();
    assert_eq!((found.len(), found.mode() & 0o777, found.uid()), (24 + 5 * (16 + 60), 0o640, 65_534));
    // A block device, which could hold a file system. This one has no backing storage.
    let node = Command::new("mknod").args([&file("disk"), "b", "7", "250"]).status().unwrap();
    assert!(node.success());
    for more in ["", ",overwrite"] {
        let to = format!("pcap:-,{}{more}", file("disk"));
        assert_ended(&switch(&["--port", "gen:count=5", "--port", &to]), 1, &["disk'", "is a block device"]);
    }
    // A file cannot be both the input and the output.
    fs::write(file("in"), capture(5)).unwrap();
    let to = format!("pcap:-,{},overwrite", file("in"));
    let run = |args: &[&str]| Command::new(binary().unwrap()).args(args).output().unwrap();
    let output = run(&["pktgen", "--port", &to, "--pcap", &file("in"), "--count", "1"]);
    assert_ended(&output, 1, &["in'", "which is read: expected another file"]);
    assert_eq!(fs::read(file("in")).unwrap(), capture(5));
    fs::write(file("p.svg"), "old").unwrap();
    let output = run(&["bench", "model", "--plot", &file("p.svg")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("it exists"), "{said}");
}

#[test]
fn unread_stdout_does_not_delay_exit() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s");
    let port = format!("vhost:{}", socket.display());
    let args = ["switch", "--mbufs", "4096", "--hugepages", "none", "--port", &port, "--idle", "sleep"];
    let mut command = Command::new(binary().unwrap());
    command.args(args).args(["--stats-interval", "0.001", "--format", "json"]);
    // The output is not read, so the pipe is soon full.
    let mut offcore = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the socket is there", || socket.exists());
    std::thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&offcore), Signal::TERM).unwrap();
    wait_until("it has ended", || offcore.try_wait().unwrap().is_some());
    assert!(!socket.exists());
}

#[test]
fn unconnected_pipe_does_not_delay_exit() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let pipe = dir.file("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    for (ends, code) in [("", 0), ("-,", 1)] {
        let port = format!("pcap:{ends}{}", pipe.display());
        let args = ["switch", "--mbufs", "4096", "--hugepages", "none", "--port", &port, "--port", "gen:"];
        let mut offcore =
            Offcore::start(&[&args[..], &["--stats-interval", "0.1", "--format", "json"]].concat()).unwrap();
        wait_for_report(&mut offcore);
        offcore.signal(Signal::TERM).unwrap();
        let finished = offcore.wait().unwrap();
        assert_eq!(finished.status.code(), Some(code), "{port}");
        // A message says that sent packets were not read.
        assert_eq!(finished.stderr.contains("bytes were not read"), code == 1);
    }
}

#[test]
fn repeated_signals_keep_cleanup() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s");
    let port = format!("vhost:{}", socket.display());
    let args = ["switch", "--mbufs", "4096", "--hugepages", "none", "--port", &port, "--format", "json"];
    let args = [&args[..], &["--stats-interval", "0.1", "--idle", "sleep"]].concat();
    for signals in
        [&[Signal::TERM, Signal::TERM][..], &[Signal::HUP], &[Signal::INT, Signal::HUP, Signal::TERM]]
    {
        let mut offcore = Offcore::start(&args).unwrap();
        wait_for_report(&mut offcore);
        assert!(socket.exists());
        for &signal in signals {
            offcore.signal(signal).unwrap();
        }
        let finished = offcore.wait().unwrap();
        assert_eq!((finished.status.code(), finished.status.signal()), (Some(0), None), "{signals:?}");
        Report::last_of(&finished);
        assert!(!socket.exists(), "{signals:?}");
    }
    // A signal that the parent has set to be ignored does not stop the process.
    let mut offcore = Command::new("nohup");
    let mut offcore = offcore.arg(binary().unwrap()).args(&args).stdout(Stdio::null()).spawn().unwrap();
    let process = Pid::from_child(&offcore);
    wait_until("the socket is there", || socket.exists());
    kill_process(process, Signal::HUP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(offcore.try_wait().unwrap().is_none() && socket.exists());
    kill_process(process, Signal::TERM).unwrap();
    assert!(offcore.wait().unwrap().success() && !socket.exists());
}

#[test]
fn interfaces_in_use_are_refused() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let [here, there] = [(); 2].map(|()| Netns::new().unwrap());
    for name in ["used", "bare"] {
        here.veth(name, &there, name).unwrap();
        there.ip(&["link", "set", name, "up"]).unwrap();
        here.ip(&["link", "set", name, "up"]).unwrap();
    }
    here.configure("used", "192.0.2.2/24").unwrap();
    here.ip(&["route", "add", "default", "via", "192.0.2.1"]).unwrap();
    let offcore = |args: &[&str]| {
        let mut command = here.command(binary().unwrap());
        command.args(args).output().unwrap()
    };
    let run = |ports: &[&str]| {
        let ports = ports.iter().flat_map(|port| ["--port", port]);
        let args = [
            "switch",
            "--mbufs",
            "8192",
            "--hugepages",
            "none",
            "--duration",
            "0.2",
            "--stats-interval",
            "0",
        ];
        offcore(&args.into_iter().chain(ports).collect::<Vec<_>>())
    };
    let programs = || here.ip(&["-d", "link", "show", "used"]).unwrap().matches("xdp").count();
    let words = ["'used' is in use (address 192.0.2.2/24, the default route)", "af_packet:used", "'force'"];
    assert_ended(&run(&["af_xdp:used"]), 1, &words);
    assert_eq!(programs(), 0);
    let output = run(&["af_packet:used"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("is in use (address 192.0.2.2/24"), "{said}");
    for ports in [["af_packet:bare", "af_packet:bare"], ["af_packet:bare", "af_xdp:bare"]] {
        let output = run(&ports);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("both have interface bare"), "{said}");
    }
    here.ip(&["link", "property", "add", "dev", "bare", "altname", "the-other-name"]).unwrap();
    let words = ["af_packet:bare' has interface 'the-other-name' already"];
    assert_ended(&run(&["af_packet:bare", "af_packet:the-other-name"]), 1, &words);
    let listed = offcore(&["port", "list"]);
    let listed = String::from_utf8_lossy(&listed.stdout);
    let line =
        |name: &str| listed.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_default();
    assert!(!line("used").contains("af_xdp:") && line("bare").contains("af_xdp:bare"), "{listed}");
    assert!(listed.contains("used: is in use (address 192.0.2.2/24, the default route)"), "{listed}");
    here.ip(&["link", "add", "link", "bare", "name", "upper", "type", "macvlan"]).unwrap();
    assert_ended(&run(&["af_xdp:bare"]), 1, &["'bare' is in use (upper on it)"]);
    here.ip(&["link", "delete", "upper"]).unwrap();
    // `force` takes the interface over, and it is free again afterwards.
    for port in ["af_xdp:used,force", "af_xdp:bare"] {
        let output = run(&[port]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(programs(), 0);
}

/// A new interface with the name of a deleted one.
#[test]
fn recreated_interfaces_in_use_are_refused() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let [here, there] = [(); 2].map(|()| Netns::new().unwrap());
    here.veth("p0", &there, "p0").unwrap();
    here.ip(&["link", "set", "p0", "up"]).unwrap();
    let args = "switch --mbufs 8192 --hugepages none --port af_xdp:p0 --format json --stats-interval 0.1";
    let mut offcore = Offcore::start_in(&here, &args.split(' ').collect::<Vec<_>>()).unwrap();
    wait_for_report(&mut offcore);
    here.ip(&["link", "delete", "p0"]).unwrap();
    // The new interface gets its address before it gets the name.
    here.veth("new", &there, "new").unwrap();
    here.ip(&["address", "add", "192.0.2.1/24", "dev", "new"]).unwrap();
    here.ip(&["link", "set", "new", "name", "p0"]).unwrap();
    here.ip(&["link", "set", "p0", "up"]).unwrap();
    wait_for_status(&mut offcore, 0, "is in use (address 192.0.2.1/24)");
    assert!(!here.ip(&["-d", "link", "show", "p0"]).unwrap().contains("xdp"));
    offcore.stop().unwrap();
}

#[test]
fn inaccessible_socket_is_an_error() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let (socket, copy) = (dir.file("s"), dir.file("offcore"));
    fs::copy(binary().unwrap(), &copy).unwrap();
    let port = format!("vhost:{},mode=0600", socket.display());
    let args = ["switch", "--mbufs", "4096", "--hugepages", "none", "--port", &port, "--idle", "sleep"];
    let _back_end = Offcore::start(&args).unwrap();
    wait_until("the socket is there", || socket.exists());
    std::thread::sleep(Duration::from_millis(100));
    let mut command = Command::new(copy);
    std::os::unix::process::CommandExt::uid(&mut command, 65_534);
    let port = format!("virtio-user:{}", socket.display());
    let args = ["switch", "--mbufs", "4096", "--hugepages", "none", "--port", &port, "--duration", "20"];
    let output = command.args(args).output().unwrap();
    assert_ended(
        &output,
        1,
        &["Permission denied", "its owner, group or mode has to let this user write to it"],
    );
}

//! Invalid uses of `offcore switch`: it ends immediately, names the invalid value and the remedy, and changes nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use peers::offcore::{binary, copy_binary};
use peers::{Need, Netns, Offcore, TempDir, require};

use crate::switch::wait_for_report;

/// The ID of an unprivileged user.
const UNPRIVILEGED_UID: u32 = 65_534;

/// Runs a switch that is expected to fail. With `unprivileged`, it runs as an unprivileged user.
fn refused(netns: Option<&Netns>, unprivileged: Option<&TempDir>, args: &[&str]) -> Output {
    let binary = binary().unwrap();
    let mut command = match (netns, unprivileged) {
        (Some(netns), _) => netns.command(binary),
        // The binary under test may be in a directory that the unprivileged user cannot access.
        (None, Some(dir)) => {
            let copy = dir.file("offcore");
            if !copy.exists() {
                copy_binary(&copy).unwrap();
                fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
            }
            Command::new(copy)
        }
        (None, None) => Command::new(binary),
    };
    if unprivileged.is_some() {
        command.uid(UNPRIVILEGED_UID).gid(UNPRIVILEGED_UID);
    }
    command.args(["switch", "--mbufs", "4096", "--hugepages", "none", "--duration", "1"]).args(args);
    command.output().unwrap()
}

/// Asserts that a switch with these arguments prints one line that contains all of `words`. Its exit status is 2 if the
/// arguments are always invalid, and 1 otherwise.
fn assert_refused(netns: Option<&Netns>, unprivileged: Option<&TempDir>, args: &[&str], words: &[&str]) {
    let output = refused(netns, unprivileged, args);
    let text = String::from_utf8_lossy(&output.stderr);
    let status = if text.contains("Usage:") { 2 } else { 1 };
    assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
    let line = text.lines().find(|line| line.starts_with("error: "));
    let line = line.unwrap_or_else(|| panic!("{args:?}: no error in {text}"));
    assert!(words.iter().all(|word| line.contains(word)), "{args:?}: {line}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
}

#[test]
fn files_that_are_no_captures_of_ethernet() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let header = |magic: u32, version: u16, snaplen: u32, linktype: u32| {
        let words = [magic, u32::from(version) | 4 << 16, 0, 0, snaplen, linktype];
        words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
    };
    let good = header(0xa1b2_c3d4, 2, 65_535, 1);
    let cases: [(&str, Vec<u8>, &[&str]); 8] = [
        ("empty", vec![], &["not a pcap file", "fewer than 4 bytes"]),
        ("text", b"hello, world".to_vec(), &["not a pcap file", "68 65 6c 6c"]),
        (
            "short",
            good[..20].to_vec(),
            &["ends within its header", "20 bytes, expected 24", "capture it again"],
        ),
        ("newer", header(0x0a0d_0d0a, 2, 0, 1), &["pcapng", "editcap -F pcap"]),
        (
            "cooked",
            header(0xa1b2_c3d4, 2, 65_535, 113),
            &["link type 113", "expected 1 (Ethernet)", "tcprewrite"],
        ),
        ("version", header(0xa1b2_c3d4, 7, 65_535, 1), &["version 7.4, expected 2.4", "editcap"]),
        ("fcs", header(0xa1b2_c3d4, 2, 65_535, 0x2400_0001), &["frame check sequence of 4 bytes", "editcap"]),
        ("nothing", good, &["no packets that could be repeated"]),
    ];
    for (name, bytes, words) in cases {
        let path = dir.file(name).display().to_string();
        fs::write(&path, bytes).unwrap();
        let port = format!("pcap:{path}{}", if name == "nothing" { ",loop" } else { "" });
        assert_refused(None, None, &["--port", &port], &[words, &[&path]].concat());
    }
    let missing = dir.file("missing").display().to_string();
    assert_refused(None, None, &["--port", &format!("pcap:{missing}")], &[&missing, "No such file"]);
    let nowhere = dir.file("no/where").display().to_string();
    assert_refused(None, None, &["--port", &format!("pcap:-,{nowhere}")], &[&nowhere, "No such file"]);
}

#[test]
fn excessive_pool_memory_is_refused() {
    let Some(()) = require(&[]) else { return };
    let output = Command::new(binary().unwrap())
        .args(["switch", "--port", "gen:", "--mbufs", "16777216", "--mbuf-size", "32768", "--duration", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for word in ["524288 MiB of memory are wanted", "available", "--mbufs", "--mbuf-size"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn sockets_that_cannot_be_made() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let nowhere = dir.file("no/s").display().to_string();
    for port in [format!("vhost:{nowhere}"), format!("virtio-user:{nowhere},server")] {
        assert_refused(None, None, &["--port", &port], &[&nowhere, "its directory does not exist"]);
    }
    let small = format!("virtio-user:{},mtu=9000,queue_size=4", dir.file("s").display());
    let words = ["packets take 6 buffers of 1792 bytes", "expected at most 4", "--mbuf-size", "queue_size"];
    assert_refused(None, None, &["--port", &small], &words);
}

#[test]
fn unusable_interfaces_are_refused() {
    let Some(()) = require(&[Need::Root, Need::Tun, Need::Ip]) else { return };
    let netns = Netns::new().unwrap();
    let args =
        ["switch", "--port", "tap:busy", "--idle", "sleep", "--format", "json", "--stats-interval", "0.1"];
    let mut holder = Offcore::start_in(&netns, &args).unwrap();
    wait_for_report(&mut holder);
    netns.ip(&["link", "add", "bridge0", "type", "bridge"]).unwrap();
    let links = || netns.ip(&["-o", "link"]).unwrap().lines().count();
    let before = links();
    for (port, words) in [
        ("tap:busy", &["'busy'", "another program has it open, choose another name"][..]),
        ("tap:lo", &["'lo'", "is no TAP"]),
        ("tap:bridge0", &["'bridge0'", "is no TAP"]),
    ] {
        assert_refused(Some(&netns), None, &["--port", port], words);
        assert_eq!(links(), before, "{port}");
    }
    // If a later port cannot be opened, ports that were already opened are closed.
    assert_refused(Some(&netns), None, &["--port", "tap:new0", "--port", "tap:busy"], &["'busy'"]);
    assert_eq!(links(), before);
    holder.stop().unwrap();
}

#[test]
fn missing_privileges_are_named() {
    let Some(()) = require(&[Need::Root, Need::Tun]) else { return };
    // A directory that others may read but only root may write.
    let dir = TempDir::new().unwrap();
    let own = dir.file("own");
    fs::create_dir(&own).unwrap();
    for path in [own.parent().unwrap(), &own] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let file = |name: &str| own.join(name).display().to_string();
    fs::write(file("secret.pcap"), b"").unwrap();
    fs::set_permissions(file("secret.pcap"), fs::Permissions::from_mode(0o600)).unwrap();
    for (port, words) in [
        ("tap:mine0".to_string(), &["permission"][..]),
        (format!("vhost:{}", file("s")), &["its directory has to be writable", "Permission denied"]),
        (format!("pcap:-,{}", file("out.pcap")), &["out.pcap", "Permission denied"]),
        (format!("pcap:{}", file("secret.pcap")), &["secret.pcap", "Permission denied"]),
    ] {
        if port.starts_with("tap:") && fs::metadata("/dev/net/tun").unwrap().permissions().mode() & 0o6 == 0o6
        {
            // Permission to open the device does not imply permission to create an interface.
            assert_refused(None, Some(&dir), &["--port", &port], &["it needs root or CAP_NET_ADMIN"]);
            continue;
        }
        assert_refused(None, Some(&dir), &["--port", &port], words);
    }
    assert_refused(None, Some(&dir), &["--port", "gen:", "--rt-priority", "50"], &["CAP_SYS_NICE"]);
}

/// Without privileges, as the user who owns the interface.
#[test]
fn owned_tap_interface_must_be_up() {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Tun]) else { return };
    let netns = Netns::new().unwrap();
    netns.ip(&["tuntap", "add", "dev", "tap9", "mode", "tap", "user", "0"]).unwrap();
    let open = || {
        let mut command = netns.command("setpriv");
        command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin"]).arg(binary().unwrap());
        command.args(["switch", "--mbufs", "4096", "--hugepages", "none", "--duration", "1"]);
        command.args(["--port", "tap:tap9", "--port", "gen:count=1"]).output().unwrap()
    };
    let output = open();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let advice = "'tap9': it is down, and only root may change that: `ip link set tap9 up`: ";
    assert!(said.contains(advice), "{said}");
    netns.ip(&["link", "set", "tap9", "up"]).unwrap();
    let output = open();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

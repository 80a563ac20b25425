//! Invalid uses of `offcore switch`: it ends immediately, names the invalid value and the remedy, and changes nothing.

use peers::offcore::binary;
use peers::{Need, Netns, Offcore, require};

use crate::switch::wait_for_report;

/// Asserts that a switch with these arguments prints one line that contains all of `words`. Its exit status is 2 if the
/// arguments are always invalid, and 1 otherwise.
fn assert_refused(netns: &Netns, args: &[&str], words: &[&str]) {
    let mut command = netns.command(binary().unwrap());
    command.args(["switch", "--mbufs", "4096", "--hugepages", "none", "--duration", "1"]).args(args);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let status = if text.contains("Usage:") { 2 } else { 1 };
    assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
    let line = text.lines().find(|line| line.starts_with("error: "));
    let line = line.unwrap_or_else(|| panic!("{args:?}: no error in {text}"));
    assert!(words.iter().all(|word| line.contains(word)), "{args:?}: {line}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
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
        ("tap:lo", &["'lo'", "is not a TAP"]),
        ("tap:bridge0", &["'bridge0'", "is not a TAP"]),
    ] {
        assert_refused(&netns, &["--port", port], words);
        assert_eq!(links(), before, "{port}");
    }
    // If a later port cannot be opened, ports that were already opened are closed.
    assert_refused(&netns, &["--port", "tap:new0", "--port", "tap:busy"], &["'busy'"]);
    assert_eq!(links(), before);
    holder.stop().unwrap();
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

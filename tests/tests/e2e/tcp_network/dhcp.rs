//! A port's DHCP client against dnsmasq.

use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::{Need, TempDir, offcore, one_core, require};

use crate::tcp;
use crate::tcp::inside;
use crate::tcp::{echo, stop};
use crate::tcp_veth::{NEEDS, PEER, PORT, Veth};

/// Time limits for the address and for a program.
const TIMEOUT: Duration = Duration::from_secs(20);
const PROGRAM: Duration = Duration::from_secs(60);
/// The only address in the server's pool.
const OURS: &str = "10.77.0.50";

/// A program that connects to the server's host, and prints the error.
const CONNECT: &str = "\
import errno, socket
try:
    socket.socket().connect(('10.77.0.1', 9))
except OSError as error:
    print(errno.errorcode[error.errno])
";

/// A dnsmasq process that ends with the test.
pub(super) struct Server {
    process: Child,
    directory: TempDir,
}

impl Server {
    /// Starts dnsmasq with more arguments.
    pub(super) fn new(veth: &Veth, more: &[&str]) -> Self {
        let directory = TempDir::new().unwrap();
        let mut server = veth.kernel.command("dnsmasq");
        server.args([
            "--conf-file=/dev/null",
            "--port=0",
            "--bind-interfaces",
            "--user=root",
            "--group=root",
        ]);
        server.args(["-k", "--pid-file", &format!("--interface={PEER}")]);
        server.args(more);
        server.arg(format!("--dhcp-leasefile={}", directory.file("leases").display()));
        server.stderr(Stdio::null());
        Self { process: server.spawn().unwrap(), directory }
    }

    /// Starts dnsmasq with one address in its pool.
    fn of_one_address(veth: &Veth) -> Self {
        let range = format!("--dhcp-range={OURS},{OURS},255.255.255.0,120");
        let routes = "--dhcp-option=121,10.90.0.0/16,10.77.0.1,0.0.0.0/0,10.77.0.1";
        Self::new(veth, &[&range, "--dhcp-option=26,1400", "--dhcp-option=6,10.77.0.53", routes])
    }

    /// Returns the leases.
    fn leases(&self) -> String {
        std::fs::read_to_string(self.directory.file("leases")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn host_has_its_address_from_dnsmasq() {
    let Some(()) = require(&NEEDS) else { return };
    let Some(_core) = one_core(&[Need::Dnsmasq]) else { return };
    let veth = Veth::new(1500);
    let server = Server::of_one_address(&veth);
    let port = format!("af_packet:{PORT},addr=dhcp");
    let mut offcore = tcp::start(veth.ours(), &port, &["--idle", "sleep"]);
    until("no lease", || veth.ping(OURS, 56));
    inside(&veth.kernel, || {
        echo(OURS, 7, 1, 100_000);
    });
    let shown = |report: &serde_json::Value| report["interfaces"][0]["addresses"][0]["state"] == "preferred";
    offcore.wait_for("the address", |line| line.json.as_ref().is_some_and(shown)).unwrap();
    let report = offcore.last_report().unwrap();
    let interface = &report["interfaces"][0];
    assert_eq!(interface["addresses"][0]["address"], format!("{OURS}/24"), "{interface}");
    assert_eq!(interface["addresses"][0]["origin"], "dhcp");
    assert!(interface["addresses"][0]["valid_seconds"].as_u64().unwrap() <= 120);
    assert_eq!((&interface["mtu"], &interface["dhcp_server"]), (&1400.into(), &"10.77.0.1".into()));
    let one = |address: &str| serde_json::Value::from(vec![address]);
    assert_eq!((&interface["gateways"], &interface["name_servers"]), (&one("10.77.0.1"), &one("10.77.0.53")));
    assert!(server.leases().contains(OURS));
    stop(offcore);
    until("the lease is not released", || !server.leases().contains(OURS));
}

/// Starts a program on a stack that has no address yet.
fn start(veth: &Veth) -> Process {
    let port = format!("af_packet:{PORT},addr=dhcp");
    let mut command = veth.ours().command(offcore::binary().unwrap());
    command.args(["exec", "--port", &port, "python3", "-c", CONNECT]);
    let program = Process::spawn("offcore", command).unwrap();
    until("no line says what is waited for", || program.stderr().contains("waiting for the stack"));
    program
}

#[test]
fn program_waits_for_its_address() {
    let Some(()) = require(&NEEDS) else { return };
    let Some(_core) = one_core(&[Need::Dnsmasq, Need::Python]) else { return };
    let veth = Veth::new(1500);
    let mut program = start(&veth);
    assert_eq!(program.stdout_from(0), "");
    let _server = Server::of_one_address(&veth);
    assert!(program.wait_for_exit(PROGRAM).unwrap().success(), "{}", program.tail());
    assert_eq!(program.stdout_from(0), "ECONNREFUSED\n");
}

#[test]
fn program_begins_without_address() {
    let Some(()) = require(&NEEDS) else { return };
    let Some(_core) = one_core(&[Need::Python]) else { return };
    let veth = Veth::new(1500);
    // The kernel can reach the destination. Nevertheless the program must not use the kernel's network.
    veth.ours().ip(&["addr", "add", "10.77.0.2/24", "dev", PORT]).unwrap();
    let mut program = start(&veth);
    assert!(program.wait_for_exit(PROGRAM).unwrap().success(), "{}", program.tail());
    assert_eq!(program.stdout_from(0), "ENETUNREACH\n", "{}", program.tail());
    let expected = ["no DHCP server has assigned an address within 5 s", "programs begin without it"];
    assert!(expected.iter().all(|text| program.stderr().contains(text)), "{}", program.tail());
}

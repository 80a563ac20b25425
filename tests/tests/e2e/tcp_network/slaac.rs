//! A port forms its IPv6 address from router advertisements of dnsmasq (SLAAC).

use peers::{Need, Offcore, one_core, require};
use serde_json::Value;

use super::dhcp::Server;
use crate::tcp::inside;
use crate::tcp::{KERNEL, echo, stop};
use crate::tcp_veth::{NEEDS, PEER, PORT, Veth};

/// Returns the host's address once it is valid.
fn address(report: &Value) -> Option<String> {
    let all = report["interfaces"][0]["addresses"].as_array()?;
    let own = all.iter().find(|own| own["origin"] == "slaac" && own["state"] == "preferred")?;
    own["address"].as_str()?.strip_suffix("/128").map(Into::into)
}

#[test]
fn host_makes_its_address_from_advertisements() {
    let Some(()) = require(&NEEDS) else { return };
    let Some(_core) = one_core(&[Need::Dnsmasq]) else { return };
    let veth = Veth::new(1500);
    let ra = format!("--ra-param={PEER},mtu:1400,high,5,600");
    let range = format!("--dhcp-range={},ra-only,64,600", KERNEL[1].replace("1/64", ""));
    let _server =
        Server::new(&veth, &["--enable-ra", &ra, &range, "--dhcp-option=option6:dns-server,[fd77::53]"]);
    let port = format!("af_packet:{PORT},addr=slaac");
    let args = ["tcp", "--port", &port, "--idle", "sleep", "--stats-interval", "0.2", "--format", "json"];
    let mut offcore = Offcore::start_in(veth.ours(), &args).unwrap();
    let line =
        offcore.wait_for("the address", |line| line.json.as_ref().and_then(address).is_some()).unwrap();
    let report = line.json.unwrap();
    let own = address(&report).unwrap();
    assert!(own.starts_with("fd77::"), "{report}");
    let interface = &report["interfaces"][0];
    assert!(interface["gateways"][0].as_str().unwrap().starts_with("fe80::"), "{interface}");
    assert_eq!((&interface["mtu"], &interface["name_servers"][0]), (&1400.into(), &"fd77::53".into()));
    inside(&veth.kernel, || {
        echo(&own, 7, 1, 100_000);
    });
    stop(offcore);
}

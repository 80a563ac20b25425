//! A host with a /32 address. Its gateway is on the link but not in the host's network, as in clouds and in Calico's
//! pods.

use peers::{Netns, Offcore, one_core, require};

use crate::tcp::echo;
use crate::tcp_veth::NEEDS;

const GATEWAY: &str = "169.254.1.1";
const OURS: &str = "10.79.0.2";
/// An address behind the gateway.
const FAR: &str = "192.0.2.9";

#[test]
fn slash_32_address_uses_gateway() {
    let Some(()) = require(&NEEDS) else { return };
    let _core = one_core();
    let (ours, router) = (Netns::new().unwrap(), Netns::new().unwrap());
    ours.veth("p0", &router, "v0").unwrap();
    ours.ip(&["link", "set", "p0", "up"]).unwrap();
    router.ip(&["link", "set", "v0", "up"]).unwrap();
    router.ip(&["addr", "add", &format!("{GATEWAY}/32"), "dev", "v0"]).unwrap();
    router.ip(&["addr", "add", &format!("{FAR}/32"), "dev", "lo"]).unwrap();
    router.ip(&["link", "set", "lo", "up"]).unwrap();
    router.ip(&["route", "add", &format!("{OURS}/32"), "dev", "v0"]).unwrap();
    let port = format!("af_packet:p0,addr={OURS}/32,gw={GATEWAY}");
    let args = ["tcp", "--port", &port, "--idle", "sleep", "--stats-interval", "0.2", "--format", "json"];
    let mut offcore = Offcore::start_in(&ours, &args).unwrap();
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
    for from in [GATEWAY, FAR] {
        let ping = || router.run("ping", &["-c1", "-W1", "-I", from, OURS]);
        assert!((0..20).any(|_| ping().is_ok()), "no answer to {from}: {}", offcore.tail());
    }
    router
        .within(|| {
            echo(OURS, 7, 1, 100_000);
            Ok(())
        })
        .unwrap();
    assert!(offcore.stop().unwrap().status.success());
}

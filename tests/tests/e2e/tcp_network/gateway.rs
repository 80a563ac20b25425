//! A host with a /32 address. Its gateway is on the link but not in the host's network, as in clouds and in Calico's
//! pods.

use peers::{Netns, one_core};

use crate::tcp;
use crate::tcp::echo;
use crate::tcp::inside;
use crate::tcp_veth::NEEDS;

const GATEWAY: &str = "169.254.1.1";
const OURS: &str = "10.79.0.2";
/// An address behind the gateway.
const FAR: &str = "192.0.2.9";

#[test]
fn slash_32_address_uses_gateway() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let (ours, router) = (Netns::new().unwrap(), Netns::new().unwrap());
    ours.veth("p0", &router, "v0").unwrap();
    ours.ip(&["link", "set", "p0", "up"]).unwrap();
    router.ip(&["link", "set", "v0", "up"]).unwrap();
    router.ip(&["addr", "add", &format!("{GATEWAY}/32"), "dev", "v0"]).unwrap();
    router.ip(&["addr", "add", &format!("{FAR}/32"), "dev", "lo"]).unwrap();
    router.ip(&["link", "set", "lo", "up"]).unwrap();
    router.ip(&["route", "add", &format!("{OURS}/32"), "dev", "v0"]).unwrap();
    let port = format!("af_packet:p0,addr={OURS}/32,gw={GATEWAY}");
    let offcore = tcp::start(&ours, &port, &["--idle", "sleep"]);
    for from in [GATEWAY, FAR] {
        let ping = || router.run("ping", &["-c1", "-W1", "-I", from, OURS]);
        assert!((0..20).any(|_| ping().is_ok()), "no answer to {from}: {}", offcore.tail());
    }
    inside(&router, || {
        echo(OURS, 7, 1, 100_000);
    });
    assert!(offcore.stop().unwrap().status.success());
}

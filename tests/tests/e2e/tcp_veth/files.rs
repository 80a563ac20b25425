//! Files over HTTP to curl and wrk on the other end of a veth pair.

use std::thread;

use peers::{Need, one_core};

use crate::http::{self, Site, curl};
use crate::tcp::{OURS, stop};

use super::{NEEDS, Veth};

/// curl downloads whole files and parts of them, then wrk runs many clients at once.
fn clients(site: &Site, port: &str, mtu: u16, more: &[&str]) {
    let veth = Veth::new(mtu);
    if port.starts_with("af_xdp") {
        veth.set_offloads(1, false);
    }
    let app = site.app();
    let flags = [&["--idle", "sleep", "--app", &app], more].concat();
    let offcore = veth.host(&format!("{port},mtu={mtu}"), &flags);
    let whole = site.read("many.bin");
    for address in OURS {
        let url = http::url(address, "many.bin");
        assert!(curl(&veth.kernel, &[&url]) == whole, "{port}: {url}");
        let range = ["--range", "1234567-9999999", &url];
        assert!(curl(&veth.kernel, &range) == whole[1_234_567..10_000_000], "{port}: {url}");
        let small = http::url(address, "some.txt");
        let args = ["--threads", "1", "--connections", "50", "--duration", "1s", &small];
        let report = veth.kernel.run("wrk", &args).unwrap();
        assert!(!report.contains("Socket errors") && !report.contains("Non-2xx"), "{port}: {report}");
        let requests = report.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
        assert!(requests.parse::<u64>().unwrap() >= 50, "{port}: {report}");
    }
    let finished = stop(offcore);
    let tcp = &finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap()["tcp"][0];
    assert!(tcp["accepted"].as_u64() >= Some(104), "{port}: {tcp}");
    assert!(tcp["drops"]["checksum"].is_null() && tcp["drops"]["malformed"].is_null(), "{port}: {tcp}");
}

#[test]
fn files_to_curl_and_wrk() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Curl, Need::Wrk]].concat()) else { return };
    let site = Site::new("veth");
    thread::scope(|scope| {
        scope.spawn(|| clients(&site, "af_packet:p0", 1500, &[]));
        scope.spawn(|| clients(&site, "af_xdp:p0", 9000, &["--mbuf-size", "4096"]));
    });
}

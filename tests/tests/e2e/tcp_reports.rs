//! Connections and errors in the reports of `offcore tcp`.

use std::io::{Read, Write};

use peers::{Netns, one_core};
use serde_json::Value;

use super::tcp::{NEEDS, OURS, TAP, connect, content, host_at, stop};
use crate::tcp::inside;

#[test]
fn report_lists_connections_and_retransmissions() {
    const LEN: usize = 1_000_000;
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let port = format!("impair:loss=2%,corrupt=1%,seed=3,tap:{TAP},offloads=off");
    let mut offcore = host_at(&netns, &port, &["--connections"]);
    let mut stream = None;
    inside(&netns, || {
        let mut open = connect(OURS[0], 7);
        let (bytes, mut back) = (content(1, LEN), vec![0; LEN]);
        let mut writing = open.try_clone().unwrap();
        std::thread::scope(|scope| {
            let sent = scope.spawn(|| writing.write_all(&bytes));
            open.read_exact(&mut back).unwrap();
            sent.join().unwrap()
        })
        .unwrap();
        assert!(back == bytes);
        stream = Some(open);
    });
    let local = stream.as_ref().unwrap().local_addr().unwrap().to_string();
    let is_whole = |connection: &Value| {
        connection["received"] == LEN && connection["acknowledged"] == LEN && connection["unread"] == 0
    };
    let told = offcore.wait_for("the whole connection", |line| {
        let report = line.json.as_ref();
        report.is_some_and(|report| report["connections"].as_array().unwrap().iter().any(is_whole))
    });
    let report = told.unwrap().json.unwrap();
    let [connection] = &report["connections"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&connection["remote"], &connection["state"]), (&local.into(), &"ESTABLISHED".into()));
    assert_eq!(connection["local"], format!("{}:7", OURS[0]));
    assert!(connection["again"].as_u64().unwrap() > 0, "{connection}");
    drop(stream);
    let finished = stop(offcore);
    let last = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    let tcp = &last["tcp"][0];
    assert_eq!(tcp["accepted"], 1, "{tcp}");
    let count = |name: &str| tcp[name].as_u64().unwrap();
    assert!(count("again_fast") + count("again_timeout") + count("again_probe") > 0, "{tcp}");
    assert!(tcp["drops"]["checksum"].as_u64().is_some_and(|packets| packets > 0), "{tcp}");
}

//! A stack with a low limit of file descriptors. `programs` compares an application's behaviour at its own limit with
//! the kernel's.

use peers::programs::lines;
use peers::require;

use super::super::programs::on_stack::Stack;
use super::{Beside, NEEDS, TIMEOUT, served};

#[test]
fn exhausted_descriptors_refuse_new_sessions() {
    let Some(()) = require(&NEEDS) else { return };
    let mut beside = Beside::on(Stack::behind("exhausted", &["prlimit", "--nofile=64:64"]));
    let mut greedy = beside.stack.start("exhausted", &[], &["hold"]);
    greedy.wait_for(0, TIMEOUT, "the end", |text| text.contains("some were made").then_some(())).unwrap();
    for _ in 0..3 {
        beside.goes_on();
    }
    greedy.write_line("end").unwrap();
    assert_eq!(lines(greedy).unwrap(), ["ended by: EMFILE", "some were made: yes", "later: 0"]);
    assert_eq!(beside.stack.run("slow", &["little"]), [""; 0]);
    assert_eq!(served(&beside.stack.stack, "misused"), 0);
    beside.stop();
}

//! The conformance suite detects incorrect engines: each defect here makes the named check fail.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use offcore_dma::channel::{Channel, ChannelInfo, ChannelStats, Completions, CopyOp, Reset};
use offcore_dma::conformance::CHECKS;
use offcore_dma::cpu::CpuChannel;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
    None,
    AcceptsTooMany,
    BytesMiscounted,
    FailsNow,
    KeepsAfterReset,
    LosesLastByte,
    OneByteTooMany,
    OutOfOrder,
    PollOverwrites,
    TokenTwice,
    TokensMixed,
    WritesAfterReset,
}

/// A correct channel with an added defect.
#[derive(Debug)]
struct Saboteur {
    inner: CpuChannel,
    defect: Defect,
    info: ChannelInfo,
    last: Option<CopyOp>,
}

impl Channel for Saboteur {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    fn room(&self) -> usize {
        self.inner.room() + usize::from(self.defect == Defect::AcceptsTooMany)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        let ops: Vec<CopyOp> = ops
            .iter()
            .map(|op| {
                let len = match self.defect {
                    Defect::LosesLastByte if op.len > 1000 => op.len - 1,
                    // In the suite, guard bytes follow destinations, and further bytes follow sources.
                    Defect::OneByteTooMany if op.len == 65 => op.len + 1,
                    _ => op.len,
                };
                let token = if self.defect == Defect::TokensMixed { op.token & 0xffff } else { op.token };
                CopyOp { len, token, ..*op }
            })
            .collect();
        self.last = ops.last().copied().or(self.last);
        // SAFETY: the caller keeps source and destination of each copy valid until its token is reported or a reset is
        // done; the additional byte is a guard byte of the suite.
        unsafe { self.inner.copy(&ops) }
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn poll(&mut self, completions: &mut Completions) {
        if self.defect == Defect::PollOverwrites && self.inner.in_flight() > 0 {
            completions.clear();
        }
        let before = completions.tokens.len();
        self.inner.poll(completions);
        let new = &mut completions.tokens[before..];
        match self.defect {
            Defect::OutOfOrder if new.len() > 1 => new.reverse(),
            Defect::TokenTwice if new.len() > 1 => new[0] = new[1],
            Defect::FailsNow => {
                if let Some(token) = completions.tokens.pop() {
                    let copy = CopyOp { src: std::ptr::null(), dst: std::ptr::null_mut(), len: 0, token };
                    let failure = offcore_dma::channel::Failure::Hardware;
                    completions.failed.push(offcore_dma::channel::Failed { copy, failure, done: 0 });
                }
            }
            _ => {}
        }
        if let (Defect::WritesAfterReset, Some(last)) = (self.defect, self.last) {
            // SAFETY: unsound in general, which is the defect; the suite's canvas outlives the channel.
            unsafe { last.dst.write(last.src.read()) };
        }
    }

    fn reset(&mut self) -> Reset {
        self.inner.reset()
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        if self.defect != Defect::KeepsAfterReset {
            self.inner.take_outstanding(outstanding);
        }
    }

    fn stats(&self) -> ChannelStats {
        let mut stats = self.inner.stats();
        if self.defect == Defect::BytesMiscounted && stats.completed > 100 {
            stats.bytes += 1;
        }
        stats
    }
}

/// Whether the check called `name` fails on an engine with `defect`.
fn caught(defect: Defect, name: &str) -> bool {
    let open = |size| -> Box<dyn Channel> {
        let inner = CpuChannel::new(size).unwrap();
        Box::new(Saboteur { info: inner.info().clone(), inner, defect, last: None })
    };
    let check = CHECKS.iter().find(|check| check.name == name).unwrap();
    catch_unwind(AssertUnwindSafe(|| (check.run)(&open, &mut || ()))).is_err()
}

#[test]
fn each_defect_is_caught() {
    for (defect, by) in [
        (Defect::AcceptsTooMany, "a_full_ring_takes_no_more"),
        (Defect::BytesMiscounted, "statistics_are_exact"),
        (Defect::FailsNow, "each_token_comes_back_once"),
        (Defect::KeepsAfterReset, "after_a_reset_nothing_lands"),
        (Defect::LosesLastByte, "every_length_at_odd_offsets"),
        (Defect::OneByteTooMany, "every_length_at_odd_offsets"),
        (Defect::OutOfOrder, "order_is_kept_unless_out_of_order"),
        (Defect::PollOverwrites, "poll_appends_what_fits"),
        (Defect::TokenTwice, "each_token_comes_back_once"),
        (Defect::TokensMixed, "channels_do_not_mix"),
        (Defect::WritesAfterReset, "after_a_reset_nothing_lands"),
    ] {
        assert!(!caught(Defect::None, by), "{by} fails without a defect");
        assert!(caught(defect, by), "{defect:?} passes {by}");
    }
}

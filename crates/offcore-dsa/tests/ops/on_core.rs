//! Without a device, the core executes operations and reports that.

use offcore_dsa::Opcode;
use offcore_dsa::ops::{Done, DoneBy, Engine, Operation, OpsError, Source, Why};

use super::{copy, unbounded};

const DONE: Done =
    Done { difference: None, crc: 0, done_by: DoneBy::Core(Why::NoDevice), descriptors: 0, resumed: 0 };

#[test]
fn every_operation_has_its_result() {
    let mut engine = Engine::core();
    assert!(!engine.has_device());
    let digits = *b"123456789";
    let src = Source::from(&digits[..]);
    let mut dst = [0; 9];
    assert_eq!(copy(&mut engine, &digits, &mut dst), DONE);
    assert_eq!(dst, digits);
    // The check value of CRC-32C (iSCSI).
    assert_eq!(engine.run(Operation::Crc { src, seed: 0 }), Ok(Done { crc: 0xe306_9283, ..DONE }));
    assert_eq!(engine.run(Operation::Compare { first: src, second: dst[..].into() }), Ok(DONE));
    dst[7] = 0;
    let different = Done { difference: Some(7), ..DONE };
    assert_eq!(engine.run(Operation::Compare { first: src, second: dst[..].into() }), Ok(different));
    let pattern = 0x0807_0605_0403_0201;
    assert_eq!(engine.run(Operation::Fill { pattern, dst: dst[..].as_mut().into() }), Ok(DONE));
    assert_eq!(dst, [1, 2, 3, 4, 5, 6, 7, 8, 1]);
}

#[test]
fn empty_operations_complete_immediately() {
    let mut engine = Engine::core();
    let nothing = Done { done_by: DoneBy::Core(Why::Nothing), ..DONE };
    assert_eq!(copy(&mut engine, &[], &mut []), nothing);
    let src = Source::from(&[][..]);
    let crc = engine.run(Operation::Crc { src, seed: 7 });
    assert_eq!(crc, Ok(Done { crc: 7, ..nothing }));
    assert_eq!(engine.run(Operation::Compare { first: src, second: src }), Ok(nothing));
}

#[test]
fn lengths_are_checked_first() {
    let mut dst = [0; 2];
    let copy = Operation::Copy { src: [1, 2, 3][..].into(), dst: dst[..].as_mut().into() };
    let error = Engine::core().run(copy).unwrap_err();
    let expected =
        OpsError::Length { operation: Opcode::MemoryMove, what: "destination", found: 2, expected: 3 };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "memory move: destination has 2 bytes, expected 3");
    assert_eq!(dst, [0; 2]);
}

#[test]
fn work_of_the_core_is_polled_in_order() {
    let mut engine = Engine::core();
    let (src, mut dst) = ([9; 8], [0; 8]);
    let tickets = [0; 3].map(|_| engine.submit(unbounded(src.as_ptr(), dst.as_mut_ptr(), 8)).unwrap());
    assert_eq!(engine.in_flight(), 0);
    let polled = std::iter::from_fn(|| engine.poll()).map(|(ticket, _)| ticket);
    assert!(polled.eq(tickets));
    assert_eq!(dst, src);
}

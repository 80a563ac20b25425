//! Without a device the core does it, and says so.

use offcore_dsa::ops::encode::{DomainAddress, Window};
use offcore_dsa::ops::software::dif::{
    DestinationFlags, DifError, DifFlags, Mismatch, SourceFlags, Tags, Update,
};
use offcore_dsa::ops::software::{Crc, Pattern};
use offcore_dsa::ops::{Destination, Done, DoneBy, Engine, Expected, Operation, OpsError, Value, Why};
use offcore_dsa::{Opcode, Status};

const BY_CORE: DoneBy = DoneBy::Core(Why::NoDevice);

fn done<T>(value: T) -> Result<Done<T>, OpsError> {
    Ok(Done { value, done_by: BY_CORE, descriptors: 0, resumed: 0 })
}

#[test]
fn every_operation_on_slices_has_its_result() {
    let mut engine = Engine::core();
    assert!(!engine.has_device());
    let src = *b"123456789";
    let (mut dst, mut second) = ([0; 9], [0; 9]);
    assert_eq!(engine.copy(&src, &mut dst), done(()));
    assert_eq!(dst, src);
    assert_eq!(engine.crc(&src, Crc::default(), 0), done(0xe306_9283));
    dst.fill(0);
    assert_eq!(engine.copy_crc(&src, &mut dst, Crc::default(), 0), done(0xe306_9283));
    assert_eq!(dst, src);
    dst.fill(0);
    assert_eq!(engine.dualcast(&src, &mut dst, &mut second), done(()));
    assert_eq!((dst, second), (src, src));
    assert_eq!(engine.compare(&src, &dst), done(None));
    dst[7] = 0;
    assert_eq!(engine.compare(&src, &dst), done(Some(7)));
    assert_eq!(engine.fill(&mut dst, Pattern::of_8(0x0807_0605_0403_0201)), done(()));
    assert_eq!(dst, [1, 2, 3, 4, 5, 6, 7, 8, 1]);
    assert_eq!(engine.compare_pattern(&dst, 0x0807_0605_0403_0201), done(None));
    assert_eq!(engine.compare_pattern(&dst, 0x0907_0605_0403_0201), done(Some(7)));
    assert_eq!(engine.cache_flush(&mut dst), done(()));
    assert_eq!(engine.noop(), done(()));
    assert_eq!(engine.drain(), done(()));
}

#[test]
fn deltas_and_their_errors() {
    let mut engine = Engine::core();
    let (original, mut changed) = ([0; 64], [0; 64]);
    changed[20] = 1;
    let mut record = [0; 80];
    let delta = engine.create_delta(&original, &changed, &mut record).unwrap().value;
    assert_eq!((delta.size, delta.compared, delta.complete), (10, 64, true));
    let mut dst = original;
    engine.apply_delta(&record[..10], &mut dst).unwrap();
    assert_eq!(dst, changed);
    record.copy_within(..10, 10);
    let Err(OpsError::Delta(error)) = engine.apply_delta(&record[..20], &mut dst) else { panic!("applied") };
    assert_eq!((error.status, error.completed), (Status::DELTA_OFFSET, 10));
}

#[test]
fn data_integrity_fields_and_their_errors() {
    let mut engine = Engine::core();
    let dif = DifFlags::empty();
    let (to, from) = (DestinationFlags::empty(), SourceFlags::empty());
    let tags = Tags { reference: 5, mask: 0, application: 6 };
    let next = Tags { reference: 7, ..tags };
    let src = [0xa5; 1024];
    let mut protected = [0; 1040];
    assert_eq!(engine.dif_insert(&src, &mut protected, dif, to, tags), done(next));
    assert_eq!(engine.dif_check(&protected, dif, from, tags), done(next));
    let mut stripped = [0; 1024];
    assert_eq!(engine.dif_strip(&protected, &mut stripped, dif, from, tags), done(next));
    assert_eq!(stripped, src);
    let mut fields = [0; 16];
    assert_eq!(engine.dix_generate(&src, &mut fields, dif, to, tags), done(next));
    assert_eq!((&fields[..8], &fields[8..]), (&protected[512..520], &protected[1032..]));
    let update = Update { dif, source: from, destination: to };
    let mut updated = [0; 1040];
    let new = Tags { reference: 100, ..tags };
    let expected = (next, Tags { reference: 102, ..tags });
    assert_eq!(engine.dif_update(&protected, &mut updated, update, tags, new), done(expected));
    assert_eq!(engine.dif_check(&updated, dif, from, new).unwrap().value.reference, 102);
    let error = DifError { mismatch: Mismatch::REFERENCE, completed: 0 };
    assert_eq!(engine.dif_check(&updated, dif, from, tags), Err(OpsError::Dif(error)));
}

#[test]
fn nothing_is_done_at_once() {
    let mut engine = Engine::core();
    let nothing = DoneBy::Core(Why::Nothing);
    assert_eq!(engine.copy(&[], &mut []).unwrap().done_by, nothing);
    assert_eq!(engine.crc(&[], Crc::default(), 7).unwrap().value, 7);
    assert_eq!(engine.compare(&[], &[]).unwrap().value, None);
    assert_eq!(engine.cache_flush(&mut []).unwrap().done_by, nothing);
}

#[test]
fn lengths_are_checked_before_anything_is_done() {
    let mut engine = Engine::core();
    let error = engine.copy(&[1, 2, 3], &mut [0; 2]).unwrap_err();
    let expected = OpsError::Length {
        operation: Opcode::MemoryMove,
        what: "destination",
        found: 2,
        expected: Expected::Exactly(3),
    };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "memory move: destination has 2 bytes, expected 3");
    let is = |error: OpsError, text: &str| assert_eq!(error.to_string(), text);
    is(
        engine.create_delta(&[0; 12], &[0; 12], &mut []).unwrap_err(),
        "create delta record: length has 12 bytes, expected a multiple of 8",
    );
    let large = vec![0; 0x8_0008];
    is(
        engine.create_delta(&large, &large, &mut []).unwrap_err(),
        "create delta record: length has 524296 bytes, expected at most 524288",
    );
    is(
        engine.apply_delta(&[0; 10], &mut vec![0; 0x8_0008]).unwrap_err(),
        "apply delta record: destination has 524296 bytes, expected at most 524288",
    );
    let (dif, flags, tags) = (DifFlags::empty(), DestinationFlags::empty(), Tags::default());
    is(
        engine.dif_insert(&[0; 512], &mut [0; 512], dif, flags, tags).unwrap_err(),
        "DIF insert: destination has 512 bytes, expected at least 520",
    );
    is(
        engine.dif_insert(&[0; 500], &mut [0; 520], dif, flags, tags).unwrap_err(),
        "DIF insert: length has 500 bytes, expected a multiple of 512",
    );
}

#[test]
fn only_a_plain_copy_may_overlap_itself() {
    let mut engine = Engine::core();
    let mut bytes: Vec<u8> = (0..64).collect();
    let all = Destination::from(&mut bytes[..]);
    let (src, dst) =
        (Destination::new(bytes.as_mut_ptr(), 32), Destination::new(bytes.as_mut_ptr().wrapping_add(8), 32));
    // SAFETY: the memory is `bytes`, which nobody else uses in the meantime.
    let copied = unsafe { engine.run(Operation::Copy { src: src.as_source(), dst }) };
    assert_eq!(copied.unwrap().value, Value::Nothing);
    assert!(bytes[8..40].iter().copied().eq(0..32));
    let (crc, seed) = (Crc::default(), 0);
    // SAFETY: as above.
    let refused = unsafe { engine.run(Operation::CopyCrc { src: src.as_source(), dst, crc, seed }) };
    assert_eq!(refused, Err(OpsError::Overlap { operation: Opcode::CopyCrc }));
    // SAFETY: as above.
    let refused = unsafe { engine.submit(Operation::ApplyDelta { record: all.as_source(), dst }) };
    assert!(matches!(refused, Err(OpsError::Length { .. } | OpsError::Overlap { .. })), "{refused:?}");
}

#[test]
fn inter_domain_operations_are_refused_by_name() {
    let mut engine = Engine::core();
    let (here, there) =
        (DomainAddress { address: 0, handle: None }, DomainAddress { address: 0, handle: Some(1) });
    let window = Window { range: None, offset_mode: false, write: true, read: true };
    let operations = [
        (Operation::InterDomainCopy { src: here, dst: there, len: 8 }, "inter-domain copy"),
        (
            Operation::InterDomainFill { pattern: Pattern::of_byte(0), dst: 0, handle: 1, len: 8 },
            "inter-domain fill",
        ),
        (Operation::InterDomainCompare { first: here, second: there, len: 8 }, "inter-domain compare"),
        (
            Operation::InterDomainComparePattern { src: 0, handle: 1, pattern: 0, len: 8 },
            "inter-domain compare pattern",
        ),
        (Operation::UpdateWindow { handle: 1, window, suppress_drain: false }, "update window"),
    ];
    for (operation, name) in operations {
        // SAFETY: there is no device that could touch anything.
        let error = unsafe { engine.submit(operation) }.unwrap_err();
        assert_eq!(error.to_string(), format!("{name} is not supported by the core (no device): no device"));
    }
}

#[test]
fn what_the_core_did_at_once_is_polled_in_order() {
    let mut engine = Engine::core();
    let mut dst = [0; 8];
    let fill = Operation::Fill { pattern: Pattern::of_byte(9), dst: (&mut dst[..]).into() };
    // SAFETY: `dst` is used by nobody else until all is polled.
    let tickets = [0; 3].map(|_| unsafe { engine.submit(fill) }.unwrap());
    assert_eq!(engine.in_flight(), 0);
    let polled = std::iter::from_fn(|| engine.poll()).map(|(ticket, _)| ticket);
    assert!(polled.eq(tickets));
    assert_eq!(dst, [9; 8]);
}

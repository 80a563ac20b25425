//! Tests of refused options. The measurements are tested in the crate of end-to-end tests, which has namespaces and a
//! testpmd.

use super::*;

#[test]
fn missing_requirements_are_named() {
    let lcore = lcore::available().unwrap()[0];
    let options = VethOptions::new(&[64], true, lcore, Some(lcore));
    let missing = options.missing().unwrap();
    assert!(missing.contains("two lcores") || missing.contains("root"), "{missing}");
    let error = run(&options, &Progress::hidden(), &mut |row| panic!("{row:?}")).unwrap_err().to_string();
    assert!(error.contains(&missing), "{error}");
}

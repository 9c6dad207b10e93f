use super::*;

#[test]
fn finds_what_was_inserted_until_it_is_removed() {
    let mut table = FlowTable::with_capacity(1000);
    table.insert(7, 70).unwrap();
    table.insert(7, 71).unwrap();
    assert_eq!(table.find(7, |value| value == 71), Some(71));
    assert!(table.replace(7, 71, 72));
    assert!(!table.replace(7, 71, 73));
    assert_eq!(table.find(7, |value| value > 70), Some(72));
    assert!(table.remove(7, 70));
    assert!(!table.remove(7, 70));
    assert_eq!((table.len(), table.find(7, |_| true), table.find(8, |_| true)), (1, Some(72), None));
}

use super::*;
use crate::tcp::source::PreloadedSource;

fn filled(buffer: &SendBuffer, pool: &ChunkPool, sources: &SourceTable, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let sum = buffer.fill(pool, sources, offset, &mut out);
    assert_eq!(sum.fold() % 0xffff, Sum::of(&out).fold() % 0xffff);
    out
}

#[test]
fn copied_bytes_and_slices_leave_in_the_order_of_the_calls() {
    let (mut pool, mut sources, mut buffer) =
        (ChunkPool::new(1 << 20), SourceTable::new(), SendBuffer::new());
    let page = sources.add(Box::new(PreloadedSource::new(&b"0123456789"[..])));
    assert_eq!(buffer.push_bytes(&mut pool, b"head", 100), 4);
    buffer.push_source(&mut sources, page, 2, 5).unwrap();
    assert_eq!(buffer.push_bytes(&mut pool, b"tail", 12), 3);
    assert_eq!(filled(&buffer, &pool, &sources, 0, 12), b"head23456tai");
    assert_eq!(filled(&buffer, &pool, &sources, 3, 4), b"d234");
    buffer.discard_front(&mut pool, &mut sources, 6);
    assert_eq!(filled(&buffer, &pool, &sources, 0, 6), b"456tai");
    assert_eq!(pool.in_use(), 1);
    buffer.clear(&mut pool, &mut sources);
    assert_eq!((pool.in_use(), buffer.len()), (0, 0));
    assert!(sources.release(page) && sources.is_empty());
}

//! tmp
use refrain_formats::chat::*;
#[test]
fn tmp() {
    let spec = std::fs::read_to_string("/tmp/tmpl_case").unwrap();
    let (n, rest) = spec.split_once('\n').unwrap();
    let mut it = rest.trim_end_matches('\n').split('|');
    let (a, b, c) = (it.next().unwrap(), it.next().unwrap(), it.next().unwrap());
    let n: usize = n.parse().unwrap();
    let src = format!("{a}{}{c}", b.repeat(n));
    println!("{:?}", ChatTemplate::new(&src, Default::default()).map(|t| t.render(&[], &Default::default()).map(|s| s.len())).map_err(|e| e.to_string()));
}

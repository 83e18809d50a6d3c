
use refrain_driver::*;
use std::sync::Arc;
pub fn f1(stream: &mut Stream, memory: &Arc<Memory>, options: &RecordOptions) -> Result<(), DriverError> {
    stream.record(memory, Method::Stream, options, |q| {
        stream.synchronize()
    })?;
    Ok(())
}
pub fn f2(stream: &mut Stream, lease: &Lease, memory: &Arc<Memory>, logits: Buf, options: &RecordOptions) -> Result<(), DriverError> {
stream.record(memory, Method::Nodes, options, |q| {
    let mut host = [0; 4];
    stream.download(lease, logits, &mut host)
})?;
Ok(())
}
pub fn f3(stream: &mut Stream, memory: &Arc<Memory>, launch: &Launch, options: &RecordOptions) -> Result<(), DriverError> {
    stream.record(memory, Method::Stream, options, |q| {
        std::thread::scope(|s| s.spawn(move || q.launch(launch)).join().unwrap())
    })?;
    Ok(())
}
pub fn f4(graph: &Graph, lease: &mut Lease, stream: &mut Stream, logits: Buf) -> Result<(), DriverError> {
    let out = graph.replay(lease, stream)?;
    graph.replay(lease, stream)?;
    out.read(stream, logits, &mut [0; 4])?;
    Ok(())
}
pub fn f5(one: &Graph, other: &Graph, lease: &mut Lease, stream: &mut Stream, logits: Buf) -> Result<(), DriverError> {
    let out = one.replay(lease, stream)?;
    other.replay(lease, stream)?;
    out.read(stream, logits, &mut [0; 4])?;
    Ok(())
}
pub fn f6(q: &mut dyn Queue, l: &Launch) {
    std::thread::scope(|s| { s.spawn(|| q.launch(l)); });
}
pub fn f7() {
    let device = Device::open(DeviceKind::Sim(sim::SimOptions::default())).unwrap();
    let ctx = device.context().unwrap();
    std::thread::spawn(move || drop(ctx));
}

//! Detection of physical cores.

/// Number of cores with at least one usable hardware thread, if the system reports it.
pub(super) fn physical_cores() -> Option<usize> {
    let mut siblings = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()? {
        let path = entry.ok()?.path().join("topology/thread_siblings_list");
        if let Ok(list) = std::fs::read_to_string(path) {
            siblings.insert(list);
        }
    }
    (!siblings.is_empty()).then_some(siblings.len())
}

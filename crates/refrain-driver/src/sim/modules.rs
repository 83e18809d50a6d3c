//! Kernel names in a module image, read from PTX, from a cubin's section names, or from a plain list.

use crate::api::Code;

/// A kernel of an image, with its parameter sizes if the image states them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageEntry {
    pub(super) name: String,
    pub(super) param_sizes: Option<Vec<usize>>,
}

/// Reads the kernel names of an image.
pub(super) fn entries(image: &[u8]) -> Result<Vec<ImageEntry>, Code> {
    if image.starts_with(b"\x7fELF") {
        return Ok(cubin_entries(image));
    }
    let text = std::str::from_utf8(image).map_err(|_| Code::INVALID_IMAGE)?;
    let text = text.trim_end_matches('\0');
    let mut lines = text.lines().map(str::trim);
    if lines.next() == Some("sim") {
        let named = |name: &str| ImageEntry { name: name.to_owned(), param_sizes: None };
        return Ok(lines.filter(|l| !l.is_empty()).map(named).collect());
    }
    if text.trim().is_empty() {
        return Err(Code::INVALID_IMAGE);
    }
    let code = without_comments(text);
    if !code.contains(".version") || !code.contains(".target") {
        return Err(Code::INVALID_PTX);
    }
    ptx_entries(&code).ok_or(Code::INVALID_PTX)
}

/// Finds kernels by section name: the code of each one is in a section called `.text.NAME`.
fn cubin_entries(image: &[u8]) -> Vec<ImageEntry> {
    const PREFIX: &[u8] = b"\0.text.";
    let mut found: Vec<ImageEntry> = Vec::new();
    for offset in find_all(image, PREFIX) {
        let rest = &image[offset + PREFIX.len()..];
        let end = rest.iter().position(|&b| b == 0).unwrap_or(rest.len());
        if let Ok(name) = std::str::from_utf8(&rest[..end])
            && !name.is_empty()
            && found.iter().all(|e| e.name != name)
        {
            found.push(ImageEntry { name: name.to_owned(), param_sizes: None });
        }
    }
    found
}

fn find_all<'a>(bytes: &'a [u8], needle: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    bytes.windows(needle.len()).enumerate().filter(move |(_, w)| *w == needle).map(|(i, _)| i)
}

fn ptx_entries(code: &str) -> Option<Vec<ImageEntry>> {
    let mut found = Vec::new();
    for (offset, _) in code.match_indices(".entry") {
        let rest = code[offset + ".entry".len()..].trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '$' | '%')))?;
        let (name, rest) = rest.split_at(end);
        if name.is_empty() {
            return None;
        }
        let rest = rest.trim_start();
        let param_sizes = match rest.strip_prefix('(') {
            Some(list) => {
                let list = &list[..list.find(')')?];
                let params = list.split(',').map(str::trim).filter(|p| !p.is_empty());
                Some(params.map(param_size).collect::<Option<Vec<_>>>()?)
            }
            None => Some(Vec::new()),
        };
        found.push(ImageEntry { name: name.to_owned(), param_sizes });
    }
    Some(found)
}

/// Returns the size of `.param .u64 name`, `.param .u64 .ptr .global .align 1 name` or `.param .align 8 .b8
/// name[24]`.
fn param_size(param: &str) -> Option<usize> {
    let words = param.split_whitespace();
    let element = words.clone().find_map(|word| match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        _ => None,
    })?;
    let count = match param.split_once('[') {
        Some((_, rest)) => rest.split_once(']')?.0.trim().parse().ok()?,
        None => 1,
    };
    Some(element * count)
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("/*") {
        out.push_str(&rest[..start]);
        rest = rest[start + 2..].split_once("*/").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    out.lines().map(|l| l.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_entries_have_names_and_parameter_sizes() {
        let ptx = "//.entry not_me\n.version 8.0\n.target sm_90\n/* .entry nor_me( */\n.visible .entry add(\n\
            .param .u64 .ptr .global .align 1 add_0,\n.param .u32 add_1,\n.param .align 8 .b8 add_2[24]\n)\n{ ret; }\n\
            .entry bare\n{ ret; }";
        let found = entries(ptx.as_bytes()).unwrap();
        assert_eq!(found[0], ImageEntry { name: "add".into(), param_sizes: Some(vec![8, 4, 24]) });
        assert_eq!(found[1].name, "bare");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn an_invalid_image_is_refused_with_the_driver_s_code() {
        assert_eq!(entries(&[0xff, 0xfe, 1]), Err(Code::INVALID_IMAGE));
        assert_eq!(entries(b""), Err(Code::INVALID_IMAGE));
        assert_eq!(entries(b"hello"), Err(Code::INVALID_PTX));
        assert_eq!(entries(b".version 8.0\n.target sm_90\n.entry broken("), Err(Code::INVALID_PTX));
    }

    #[test]
    fn kernels_of_a_cubin_are_found_by_section_name() {
        let image = b"\x7fELF....\0.text.add\0.nv.info.add\0.text.mul\0";
        let names: Vec<String> = entries(image).unwrap().into_iter().map(|e| e.name).collect();
        assert_eq!(names, ["add", "mul"]);
    }
}

//! Kernels compiled ahead of time and embedded in the binary.
//!
//! An archive begins with a digest of the sources it was compiled from. Code from other sources is never
//! used: launchers and kernels agree on the meaning of parameters only within one version.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use sha2::{Digest, Sha256};

use crate::error::KernelError;
use crate::load::GpuArch;
use crate::nvrtc::{Image, Nvrtc, OPTIONS, compile_all};
use crate::source::{HEADERS, KernelFamily};
use crate::tuning::Tuning;

const MAGIC: &[u8; 8] = b"refrainP";
const DIGEST_BYTES: usize = 32;
/// Header words of an entry: major, minor, unpacked image size, entry size.
const HEAD_WORDS: usize = 4;
/// Larger than any image; limits the allocation for a damaged length.
const MAX_IMAGE_BYTES: usize = 256 << 20;

/// The embedded archive; empty unless `cargo xtask dist` built the binary.
static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/prebuilt.bin"));

/// Reason why an archive cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Compiled from other sources.
    Stale,
    /// Corrupt.
    Damaged,
}

/// Code for several architectures, as packed by [`prebuild`].
#[derive(Debug, Default)]
pub(crate) struct Archive<'a> {
    entries: Vec<ArchiveEntry<'a>>,
}

#[derive(Debug)]
struct ArchiveEntry<'a> {
    arch: GpuArch,
    image_bytes: usize,
    digest: &'a [u8],
    packed: &'a [u8],
}

impl<'a> Archive<'a> {
    /// Parses an archive; empty input is an empty archive.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Archive<'a>, Unusable> {
        if bytes.is_empty() {
            return Ok(Archive::default());
        }
        let remaining = bytes.strip_prefix(MAGIC).ok_or(Unusable::Damaged)?;
        let (digest, mut remaining) = remaining.split_at_checked(DIGEST_BYTES).ok_or(Unusable::Damaged)?;
        if digest != source_digest() {
            return Err(Unusable::Stale);
        }
        let mut entries = Vec::new();
        while !remaining.is_empty() {
            let (head, after) = remaining.split_at_checked(4 * HEAD_WORDS).ok_or(Unusable::Damaged)?;
            let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| head[4 * i + b]));
            let (digest, after) = after.split_at_checked(DIGEST_BYTES).ok_or(Unusable::Damaged)?;
            let (packed, after) = after.split_at_checked(word(3) as usize).ok_or(Unusable::Damaged)?;
            let arch = GpuArch { major: word(0), minor: word(1) };
            entries.push(ArchiveEntry { arch, image_bytes: word(2) as usize, digest, packed });
            remaining = after;
        }
        Ok(Archive { entries })
    }

    /// Architectures with code in the archive.
    pub(crate) fn archs(&self) -> Vec<GpuArch> {
        self.entries.iter().map(|e| e.arch).collect()
    }

    /// Unpacks the image that suits a GPU best; `None` if none fits.
    pub(crate) fn image_for(&self, card: GpuArch) -> Option<Result<(GpuArch, Vec<u8>), Unusable>> {
        let fitting = self.entries.iter().filter(|e| e.arch.runs_on(card)).max_by_key(|e| e.arch)?;
        Some(fitting.unpack().map(|bytes| (fitting.arch, bytes)))
    }
}

impl ArchiveEntry<'_> {
    fn unpack(&self) -> Result<Vec<u8>, Unusable> {
        if Sha256::digest(self.packed)[..] != *self.digest || self.image_bytes > MAX_IMAGE_BYTES {
            return Err(Unusable::Damaged);
        }
        let mut bytes = Vec::with_capacity(self.image_bytes);
        let read = DeflateDecoder::new(self.packed).take(self.image_bytes as u64 + 1).read_to_end(&mut bytes);
        match read {
            Ok(n) if n == self.image_bytes => Ok(bytes),
            Ok(_) | Err(_) => Err(Unusable::Damaged),
        }
    }
}

/// Compiles every kernel for several architectures, packed for embedding.
pub fn prebuild(nvrtc: &Nvrtc, archs: &[GpuArch]) -> Result<Vec<u8>, KernelError> {
    let images = archs.iter().map(|&arch| Ok((arch, compile_all(nvrtc, arch, false)?)));
    Ok(pack(&images.collect::<Result<Vec<_>, KernelError>>()?))
}

/// Packs images into an archive.
pub(crate) fn pack(images: &[(GpuArch, Image)]) -> Vec<u8> {
    let mut out = [MAGIC.as_slice(), &source_digest()].concat();
    for (arch, image) in images {
        let bytes = image.to_bytes();
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        // Writing to a vector cannot fail; if it did, the archive would be detected as damaged.
        let packed = encoder.write_all(&bytes).and_then(|()| encoder.finish()).unwrap_or_default();
        for word in [arch.major, arch.minor, bytes.len() as u32, packed.len() as u32] {
            out.extend(word.to_le_bytes());
        }
        out.extend(Sha256::digest(&packed));
        out.extend(packed);
    }
    out
}

/// The archive embedded in this binary.
pub(crate) fn embedded() -> &'static [u8] {
    EMBEDDED
}

/// Architectures with prebuilt kernels in this binary.
#[must_use]
pub fn prebuilt_archs() -> Vec<GpuArch> {
    Archive::parse(EMBEDDED).map(|archive| archive.archs()).unwrap_or_default()
}

/// Digest of everything that kernels are compiled from, except the compiler.
fn source_digest() -> [u8; DIGEST_BYTES] {
    let mut digest = Sha256::new();
    let mut add = |part: &[u8]| {
        // Length first, so that different lists of parts never concatenate to the same bytes.
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    };
    for family in KernelFamily::ALL {
        add(family.name().as_bytes());
        add(family.source().as_bytes());
    }
    HEADERS.iter().for_each(|(name, text)| [name, text].iter().for_each(|part| add(part.as_bytes())));
    Tuning::ALL.iter().for_each(|tuning| add(tuning.header().as_bytes()));
    OPTIONS.iter().for_each(|option| add(option.to_bytes()));
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{KernelLoadOptions, KernelOrigin, Kernels, simulated};
    use crate::source::KernelUnit;
    use crate::supply::twins;
    use refrain_driver::sim::SimOptions;

    const SM_80: GpuArch = GpuArch { major: 8, minor: 0 };
    const SM_86: GpuArch = GpuArch { major: 8, minor: 6 };
    const SM_90: GpuArch = GpuArch { major: 9, minor: 0 };

    /// Stands for machine code on the simulated device: the names of the kernels.
    fn image() -> Image {
        Image::new(twins(KernelUnit::all()))
    }

    fn archive() -> Vec<u8> {
        pack(&[(SM_80, image()), (SM_90, image())])
    }

    /// Loads an archive as on a machine without NVRTC.
    fn load(archive: &[u8], card: GpuArch) -> Result<KernelOrigin, KernelError> {
        let device = simulated(SimOptions::default()).unwrap();
        let nvrtc = Some("/nowhere/libnvrtc.so".into());
        let options = KernelLoadOptions { arch: Some(card), nvrtc, ..KernelLoadOptions::default() };
        Kernels::from_archive(&device.context().unwrap(), &options, archive).map(|k| k.origin())
    }

    #[test]
    fn prebuilt_kernels_need_no_compiler_on_a_matching_gpu() {
        let archive = archive();
        assert_eq!(load(&archive, SM_90).unwrap(), KernelOrigin::Prebuilt(SM_90));
        assert_eq!(load(&archive, SM_86).unwrap(), KernelOrigin::Prebuilt(SM_80));
        assert_eq!(Archive::parse(&archive).unwrap().archs(), [SM_80, SM_90]);
    }

    #[test]
    fn an_unsupported_gpu_is_an_error_that_lists_the_archive_and_an_install_hint() {
        let error = load(&archive(), GpuArch { major: 12, minor: 0 }).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("sm_120") && text.contains("sm_80, sm_90"), "{text}");
        assert!(text.contains("/nowhere/libnvrtc.so"), "{text}");
        assert!(error.hint().unwrap().contains("pip install nvidia-cuda-nvrtc"));
        let text = load(&[], SM_90).unwrap_err().to_string();
        assert!(text.contains("no prebuilt kernels"), "{text}");
    }

    #[test]
    fn code_from_other_sources_is_never_used() {
        let mut stale = archive();
        stale[MAGIC.len()] ^= 1;
        assert_eq!(Archive::parse(&stale).unwrap_err(), Unusable::Stale);
        assert!(matches!(load(&stale, SM_90), Err(KernelError::NoKernels { .. })));
    }

    #[test]
    fn a_damaged_archive_is_detected_wherever_it_is_cut_or_changed() {
        let archive_bytes = archive();
        for cut in 1..archive_bytes.len() {
            // A cut between two entries leaves a smaller but intact archive.
            let image = Archive::parse(&archive_bytes[..cut]).map(|archive| archive.image_for(SM_90));
            assert!(!matches!(image, Ok(Some(Ok((SM_90, _))))), "{cut}");
        }
        for at in (0..archive_bytes.len()).step_by(7) {
            let mut wrong = archive_bytes.clone();
            wrong[at] ^= 0x10;
            if let Ok(archive) = Archive::parse(&wrong)
                && let Some(Ok((_, bytes))) = archive.image_for(SM_90)
            {
                assert_eq!(Image::from_bytes(&bytes), Some(image()), "{at}");
            }
        }
    }

    #[test]
    fn the_embedded_archive_can_be_read() {
        assert!(Archive::parse(EMBEDDED).is_ok(), "REFRAIN_PREBUILT_KERNELS names code from other sources");
    }
}

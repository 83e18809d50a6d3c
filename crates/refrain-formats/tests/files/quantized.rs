//! Folders with quantised weights: what is refused, and values at the edges. Whole models are in the tests of
//! refrain-models.

use crate::common::{llama_config, refused};
use refrain_formats::FormatError;
use refrain_formats::ModelFiles;
use refrain_formats::hf::HfFolder;
use refrain_tensor::{DType, HostTensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

struct Part(&'static str, Dtype, Vec<usize>, Vec<u8>);

fn write(config: Value, parts: &[Part]) -> TempDir {
    let folder = tempdir().unwrap();
    let mut all = llama_config();
    all["quantization_config"] = config;
    all["torch_dtype"] = json!("bfloat16");
    std::fs::write(folder.path().join("config.json"), all.to_string()).unwrap();
    fn view(Part(name, dtype, shape, bytes): &Part) -> (String, TensorView<'_>) {
        ((*name).to_owned(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    }
    let bytes = safetensors::serialize(parts.iter().map(view), None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

fn load(config: Value, parts: &[Part]) -> Result<HostTensor, FormatError> {
    let folder = write(config, parts);
    HfFolder::open(folder.path())?.tensor("a.weight")
}

/// The message without the name of the file.
fn refusal(config: Value, parts: &[Part]) -> String {
    let message = refused(load(config, parts));
    message.split_once(": ").unwrap().1.to_owned()
}

fn fp8(block: Value) -> Value {
    json!({ "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block })
}

fn gptq(group: i64) -> Value {
    json!({ "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": false, "sym": true })
}

fn words(n: usize, word: u32) -> Vec<u8> {
    word.to_le_bytes().repeat(n)
}

fn halves(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
}

/// A matrix of 8 rows and 64 columns whose codes are all 9, in groups of 32.
fn gptq_parts(scales: &[f32], qzero: u32) -> Vec<Part> {
    vec![
        Part("a.qweight", Dtype::I32, vec![8, 8], words(64, 0x9999_9999)),
        Part("a.qzeros", Dtype::I32, vec![2, 1], words(2, qzero)),
        Part("a.scales", Dtype::F16, vec![2, 8], halves(scales)),
    ]
}

#[test]
fn schemes_that_are_not_supported_are_named_with_those_that_are() {
    let group = |weights: Value, format: &str| {
        json!({ "quant_method": "compressed-tensors", "format": format,
                "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } })
    };
    let int4 = json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 });
    let rotated = {
        let mut config = group(int4.clone(), "pack-quantized");
        config["transform_config"] = json!({ "config_groups": {} });
        config
    };
    let cases = [
        (json!({ "quant_method": "bitsandbytes", "load_in_4bit": true }), "quant_method \"bitsandbytes\""),
        (json!({ "load_in_8bit": true }), "quant_method \"\""),
        (json!({ "quant_method": "awq", "bits": 4, "version": "gemv" }), "AWQ version \"gemv\""),
        (json!({ "quant_method": "awq", "bits": 3, "group_size": 128 }), "AWQ with 3 bits"),
        (json!({ "quant_method": "gptq", "bits": 3, "group_size": 128 }), "GPTQ with 3 bits"),
        (
            json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }),
            "GPTQ with checkpoint_format \"marlin\"",
        ),
        (json!({ "quant_method": "gptq", "bits": 4, "group_size": 0 }), "a group_size of 0"),
        (fp8(json!([128])), "weight_block_size [128]"),
        (json!({ "quant_method": "compressed-tensors" }), "compressed-tensors without config_groups"),
        (
            group(
                json!({ "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 }),
                "nvfp4",
            ),
            "compressed-tensors with strategy \"tensor_group\"",
        ),
        (
            group(
                json!({ "num_bits": 2, "type": "int", "strategy": "group", "group_size": 32 }),
                "pack-quantized",
            ),
            "compressed-tensors format \"pack-quantized\" with int weights of 2 bits",
        ),
        (rotated, "compressed-tensors with a transform_config"),
    ];
    for (config, found) in cases {
        let folder = write(config, &[]);
        let message = refused(ModelFiles::open(folder.path()).unwrap().config());
        let want = format!("weights quantised as {found} are not supported; fp8 ");
        assert!(message.contains(&want), "{message}");
    }
}

#[test]
fn damaged_parts_are_refused_with_the_numbers() {
    let codes =
        |shape: [usize; 2]| Part("a.weight", Dtype::F8_E4M3, shape.to_vec(), vec![0x38; shape[0] * shape[1]]);
    let scale = |shape: &[usize]| {
        let n: usize = shape.iter().product();
        Part("a.weight_scale_inv", Dtype::F32, shape.to_vec(), words(n, 0x3f80_0000))
    };
    let block = || fp8(json!([128, 128]));
    assert_eq!(
        refusal(block(), &[codes([200, 300])]),
        "tensor \"a.weight\" is quantised, but its \"a.weight_scale_inv\" is missing"
    );
    assert_eq!(
        refusal(block(), &[codes([200, 300]), scale(&[2, 2])]),
        "tensor \"a.weight_scale_inv\" has shape [2, 2], but [2, 3] is needed for a weight of 200 x 300 fp8 in blocks of \
         128x128"
    );
    assert_eq!(
        refusal(fp8(Value::Null), &[codes([2, 3]), scale(&[2, 1])]),
        "tensor \"a.weight_scale_inv\" has shape [2, 1], but [] or [1] or [1, 1] is needed for a weight of 2 x 3 fp8 with a \
         scale for each tensor"
    );
    let ints = Part("a.weight_scale_inv", Dtype::I32, vec![2, 3], words(6, 1));
    assert_eq!(
        refusal(block(), &[codes([200, 300]), ints]),
        "tensor \"a.weight_scale_inv\" has dtype I32, expected F32, F16, BF16 or F8_E8M0"
    );
    let bytes = Part("a.weight", Dtype::I8, vec![2, 2], vec![0; 4]);
    assert_eq!(
        refusal(block(), &[bytes]),
        "tensor \"a.weight\" is quantised, but no group of quantization_config fits it: it has dtype I8"
    );
    assert_eq!(
        refusal(gptq(48), &gptq_parts(&[1.0; 16], 0x7777_7777)),
        "tensor \"a.weight\": rows of 64 elements are not whole groups of 48"
    );
    assert_eq!(
        refusal(gptq(64), &gptq_parts(&[1.0; 16], 0x7777_7777)),
        "tensor \"a.scales\" has shape [2, 8], but [1, 8] is needed for a weight of 8 x 64 int4 in groups of 64"
    );
    let mut parts = gptq_parts(&[1.0; 16], 0x7777_7777);
    let groups: Vec<u8> = (0..64).flat_map(|column| i32::to_le_bytes(column / 16)).collect();
    parts.push(Part("a.g_idx", Dtype::I32, vec![64], groups));
    assert_eq!(refusal(gptq(32), &parts), "tensor \"a.g_idx\" puts column 32 into group 2, but there are 2");
    parts.remove(1);
    assert_eq!(
        refusal(gptq(32), &parts),
        "tensor \"a.weight\" is quantised, but its \"a.qzeros\" is missing"
    );
}

#[test]
fn a_weight_that_disagrees_with_its_recorded_shape_is_refused() {
    let config = json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"],
            "weights": { "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 } } } });
    let parts = |rows: i64| {
        let shape: Vec<u8> = [rows, 64].into_iter().flat_map(i64::to_le_bytes).collect();
        [
            Part("a.weight_packed", Dtype::I32, vec![4, 8], words(32, 0x9999_9999)),
            Part("a.weight_scale", Dtype::F16, vec![4, 2], halves(&[0.5; 8])),
            Part("a.weight_shape", Dtype::I64, vec![2], shape),
        ]
    };
    assert_eq!(load(config.clone(), &parts(4)).unwrap().to_f32().unwrap(), [0.5; 256]);
    assert_eq!(
        refusal(config, &parts(3)),
        "tensor \"a.weight_shape\" says that the weight is [3, 64], but its codes are for 4 x 64"
    );
}

#[test]
fn every_float_of_eight_bits_has_its_value() {
    let codes = Part("a.weight", Dtype::F8_E4M3, vec![1, 256], (0..=255).collect());
    let scale = Part("a.weight_scale_inv", Dtype::F32, vec![1, 1], words(1, 0x3f80_0000));
    let got = load(fp8(json!([128, 256])), &[codes, scale]).unwrap();
    assert_eq!(got.dtype(), DType::BF16);
    let got = got.to_f32().unwrap();
    // From the format's definition: 4 bits of exponent with bias 7, 3 of fraction, no infinity.
    let known =
        [(0x00, 0.0), (0x01, 0.001953125), (0x07, 0.013671875), (0x08, 0.015625), (0x38, 1.0), (0x7e, 448.0)];
    for (code, value) in known {
        assert_eq!((got[code], got[code + 128]), (value, -value), "{code:#x}");
    }
    assert!(got[0x7f].is_nan() && got[0xff].is_nan());
    let finite = &got[..0x7f];
    assert!(finite.is_sorted() && finite.windows(2).all(|pair| pair[0] < pair[1]));
}

#[test]
fn zero_points_of_the_first_gptq_version_carry_as_its_tools_do() {
    // All zero points 8, stored minus one; then a lowest one of 0, whose borrow went into its neighbours.
    let got = load(gptq(32), &gptq_parts(&[0.5; 16], 0x7777_7777)).unwrap();
    assert_eq!((got.dtype(), got.to_f32().unwrap()), (DType::Q4_0, vec![0.5; 512]));
    let got = load(gptq(32), &gptq_parts(&[0.5; 16], 0x8888_8880_u32.wrapping_sub(0x1111_1111))).unwrap();
    let want: Vec<f32> = (0..8).flat_map(|row| vec![if row == 0 { 4.5 } else { 0.5 }; 64]).collect();
    assert_eq!((got.dtype(), got.to_f32().unwrap()), (DType::Q4_1, want));
}

#[test]
fn scales_that_do_not_fit_in_f16_make_the_weight_floats() {
    // 2^-20 is exact; three times 2^-25 is not, and it is the largest of its row.
    let tiny = 2f32.powi(-20);
    assert_eq!(load(gptq(32), &gptq_parts(&[tiny; 16], 0x7777_7777)).unwrap().dtype(), DType::Q4_0);
    let mut parts = gptq_parts(&[1.0; 16], 0x7777_7777);
    let value = 3.0 * 2f32.powi(-25);
    parts[2] = Part("a.scales", Dtype::F32, vec![2, 8], value.to_le_bytes().repeat(16));
    let got = load(gptq(32), &parts).unwrap();
    assert_eq!((got.dtype(), got.to_f32().unwrap()), (DType::BF16, vec![value; 512]));
}

#[test]
fn parts_are_not_listed_beside_the_weight() {
    let folder = write(gptq(32), &gptq_parts(&[0.5; 16], 0x7777_7777));
    let open = HfFolder::open(folder.path()).unwrap();
    let listed: Vec<_> =
        open.tensors().iter().map(|t| (t.name().to_owned(), t.dtype(), t.n_bytes())).collect();
    assert_eq!(listed, [("a.weight".to_owned(), DType::Q4_0, 8 * 64 / 32 * 18)]);
    assert!(open.has_tensor("a.weight") && !open.has_tensor("a.qweight"));
}

//! `quantization_config` in `config.json`.

use crate::FormatError;
use crate::hf::fault::HfFault;
use crate::hf::json::JsonObject;
use refrain_tensor::DType;
use serde_json::Value;

/// How a folder stores its quantised weights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scheme {
    pub(crate) groups: Vec<Group>,
    /// The type of weights that are decoded to floats.
    pub(crate) float: DType,
    pub(crate) label: String,
}

/// Modules that are quantised in the same way.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    /// Names, classes and, after `re:`, patterns of names.
    pub(crate) targets: Vec<String>,
    pub(crate) form: Form,
}

/// How a weight `[n_out, n_in]` is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// One float of eight bits for each element.
    Float8 { scales: Scales },
    /// One signed byte for each element.
    Bytes { scales: Scales, symmetric: bool },
    /// Several integers in each word of 32 bits.
    Words { order: Order, bits: usize, scales: Scales, symmetric: bool },
    /// Two floats of four bits in each byte, and an exponent for 32 of them.
    Mxfp4,
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    Tensor,
    Row,
    /// This many neighbours in a row.
    Group(usize),
    /// Rows and columns.
    Block([usize; 2]),
}

/// Which elements share a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// compressed-tensors: neighbours in a row.
    Rows,
    /// AWQ: neighbours in a column of the transposed matrix, even ones first.
    Awq,
    /// GPTQ: neighbours in a row, as rows of the transposed matrix. The first version of the format stores zero
    /// points minus one.
    Gptq { zeros_less_one: bool },
}

impl Scheme {
    /// Reads the scheme of a folder; `None` if its weights are not quantised, or if the architecture reads them itself.
    pub(crate) fn read(config: &JsonObject) -> Result<Option<Scheme>, FormatError> {
        let Some(json) = quantization(config)? else { return Ok(None) };
        let text = config.object("text_config")?;
        let float = float_type(config)?.or(text.as_ref().map(float_type).transpose()?.flatten());
        let float = float.unwrap_or(DType::BF16);
        let (groups, what) = match json.optional::<&str>("quant_method")?.unwrap_or("") {
            "mxfp4" => return Ok(None),
            "fp8" => fp8(&json)?,
            "compressed-tensors" => compressed_tensors(&json)?,
            "awq" => awq(&json)?,
            "gptq" => gptq(&json)?,
            other => return refuse(&json, format!("quant_method {other:?}")),
        };
        let mut forms: Vec<String> = Vec::new();
        for group in &groups {
            let form = group.form.to_string();
            if !forms.contains(&form) {
                forms.push(form);
            }
        }
        Ok(Some(Scheme { groups, float, label: format!("{what}{}", forms.join(" and ")) }))
    }
}

fn quantization(config: &JsonObject) -> Result<Option<JsonObject>, FormatError> {
    for key in ["quantization_config", "compression_config"] {
        if let Some(found) = config.object(key)? {
            return Ok(Some(found));
        }
        let text = config.object("text_config")?;
        if let Some(found) = text.map(|text| text.object(key)).transpose()?.flatten() {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn refuse<T>(json: &JsonObject, found: impl Into<String>) -> Result<T, FormatError> {
    Err(FormatError::hf(json.path(), HfFault::Quantization { found: found.into() }))
}

fn float_type(config: &JsonObject) -> Result<Option<DType>, FormatError> {
    let name = match config.optional::<&str>("dtype")? {
        Some(name) => Some(name),
        None => config.optional::<&str>("torch_dtype")?,
    };
    Ok(match name {
        Some("float32") => Some(DType::F32),
        Some("float16") => Some(DType::F16),
        Some("bfloat16") => Some(DType::BF16),
        _ => None,
    })
}

type Groups = (Vec<Group>, &'static str);

/// One form for all quantised modules.
fn everywhere(form: Form, what: &'static str) -> Groups {
    (vec![Group { targets: vec!["Linear".into()], form }], what)
}

/// A positive size; `None` for a missing one and for -1, which stands for a whole row.
fn group_size(json: &JsonObject) -> Result<Option<usize>, FormatError> {
    if json.get("group_size").and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    match json.optional("group_size")? {
        Some(0) => refuse(json, "a group_size of 0"),
        size => Ok(size),
    }
}

fn fp8(json: &JsonObject) -> Result<Groups, FormatError> {
    let scales = match block(json, "weight_block_size")? {
        Some(block) => Scales::Block(block),
        None => Scales::Tensor,
    };
    if let Some(format) = json.optional::<&str>("fmt")?.filter(|format| !matches!(*format, "e4m3" | "float8"))
    {
        return refuse(json, format!("fp8 with fmt {format:?}"));
    }
    Ok(everywhere(Form::Float8 { scales }, ""))
}

fn block(json: &JsonObject, key: &str) -> Result<Option<[usize; 2]>, FormatError> {
    match json.optional::<Vec<u32>>(key)?.as_deref() {
        None => Ok(None),
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows as usize, columns as usize])),
        Some(other) => refuse(json, format!("{key} {other:?}")),
    }
}

fn awq(json: &JsonObject) -> Result<Groups, FormatError> {
    let version = match json.optional::<&str>("version")? {
        Some(version) => Some(version),
        None => json.optional("format")?,
    };
    let version = version.unwrap_or("gemm").to_lowercase();
    if version != "gemm" {
        return refuse(json, format!("AWQ version {version:?}"));
    }
    let bits = bits_of(json)?;
    if bits != 4 {
        return refuse(json, format!("AWQ with {bits} bits"));
    }
    let scales = group_size(json)?.map_or(Scales::Row, Scales::Group);
    // Whether zero points are all 8 shows only in their values.
    Ok(everywhere(Form::Words { order: Order::Awq, bits, scales, symmetric: false }, "AWQ "))
}

fn bits_of(json: &JsonObject) -> Result<usize, FormatError> {
    match json.optional("bits")? {
        Some(bits) => Ok(bits),
        None => json.required("w_bit"),
    }
}

fn gptq(json: &JsonObject) -> Result<Groups, FormatError> {
    let zeros_less_one = match json.optional::<&str>("checkpoint_format")?.unwrap_or("gptq") {
        "gptq" => true,
        "gptq_v2" => false,
        other => return refuse(json, format!("GPTQ with checkpoint_format {other:?}")),
    };
    let bits = bits_of(json)?;
    if !matches!(bits, 4 | 8) {
        return refuse(json, format!("GPTQ with {bits} bits"));
    }
    let scales = group_size(json)?.map_or(Scales::Row, Scales::Group);
    let symmetric = json.optional("sym")?.unwrap_or(true);
    Ok(everywhere(Form::Words { order: Order::Gptq { zeros_less_one }, bits, scales, symmetric }, "GPTQ "))
}

fn compressed_tensors(json: &JsonObject) -> Result<Groups, FormatError> {
    for key in ["transform_config", "sparsity_config"] {
        let object = json.object(key)?.filter(|object| {
            let is_dense = object.get("format").and_then(Value::as_str) == Some("dense");
            !object.map().is_empty() && !is_dense
        });
        if object.is_some() {
            return refuse(json, format!("compressed-tensors with a {key}"));
        }
    }
    let format = json.optional::<&str>("format")?.unwrap_or("");
    let Some(config_groups) = json.object("config_groups")? else {
        return refuse(json, "compressed-tensors without config_groups");
    };
    let mut groups = Vec::new();
    for name in config_groups.map().keys() {
        let Some(group) = config_groups.object(name)? else { continue };
        let format = group.optional::<&str>("format")?.unwrap_or(format);
        let Some(weights) = group.object("weights")? else { continue };
        let targets = group.required::<Vec<&str>>("targets")?.into_iter().map(str::to_owned).collect();
        groups.push(Group { targets, form: compressed_form(&weights, format)? });
    }
    Ok((groups, "compressed-tensors "))
}

fn compressed_form(weights: &JsonObject, format: &str) -> Result<Form, FormatError> {
    let bits = weights.optional("num_bits")?.unwrap_or(8);
    let kind = weights.optional::<&str>("type")?.unwrap_or("int");
    let size = group_size(weights)?;
    let usual = if size.is_some() { "group" } else { "tensor" };
    let strategy = weights.optional::<&str>("strategy")?.unwrap_or(usual);
    let scales = match (strategy, size, block(weights, "block_structure")?) {
        ("tensor", ..) => Scales::Tensor,
        ("channel", ..) => Scales::Row,
        ("group", Some(size), _) => Scales::Group(size),
        ("block", _, Some(block)) => Scales::Block(block),
        _ => return refuse(weights, format!("compressed-tensors with strategy {strategy:?}")),
    };
    let symmetric = weights.optional("symmetric")?.unwrap_or(true);
    let is_block = matches!(scales, Scales::Block(_));
    match (format, kind, bits) {
        ("float-quantized" | "naive-quantized", "float", 8) if symmetric => Ok(Form::Float8 { scales }),
        ("int-quantized" | "naive-quantized", "int", 8) if !is_block => Ok(Form::Bytes { scales, symmetric }),
        ("pack-quantized", "int", 4 | 8) if !is_block => {
            Ok(Form::Words { order: Order::Rows, bits, scales, symmetric })
        }
        ("mxfp4-pack-quantized", "float", 4) if size == Some(32) => Ok(Form::Mxfp4),
        _ => refuse(
            weights,
            format!("compressed-tensors format {format:?} with {kind} weights of {bits} bits"),
        ),
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Form::Float8 { scales } => write!(f, "fp8 {scales}"),
            Form::Bytes { scales, .. } => write!(f, "int8 {scales}"),
            Form::Words { bits, scales, .. } => write!(f, "int{bits} {scales}"),
            Form::Mxfp4 => write!(f, "MXFP4"),
        }
    }
}

impl std::fmt::Display for Scales {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scales::Tensor => write!(f, "with a scale for each tensor"),
            Scales::Row => write!(f, "with a scale for each row"),
            Scales::Group(size) => write!(f, "in groups of {size}"),
            Scales::Block([rows, columns]) => write!(f, "in blocks of {rows}x{columns}"),
        }
    }
}

//! Metadata values in a compact form: a list of 256 thousand tokens is two allocations.

use super::fault::GgufFault;
use std::borrow::Cow;
use std::sync::Arc;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // One variant per type of the format, under its name.
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Box<str>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one element type; arrays may hold arrays.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Box<[u8]>),
    I8(Box<[i8]>),
    U16(Box<[u16]>),
    I16(Box<[i16]>),
    U32(Box<[u32]>),
    I32(Box<[i32]>),
    F32(Box<[f32]>),
    Bool(Box<[bool]>),
    String(StrArray),
    Array(Box<[Array]>),
    U64(Box<[u64]>),
    I64(Box<[i64]>),
    F64(Box<[f64]>),
}

/// Many strings in one allocation, which clones share.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct StrArray {
    text: Arc<str>,
    ends: Arc<[usize]>, // where each string ends in `text`
}

impl StrArray {
    /// Creates an array from concatenated strings and the end of each.
    pub(crate) fn from_pushed(text: String, ends: Vec<usize>) -> StrArray {
        StrArray { text: text.into(), ends: ends.into() }
    }

    /// Returns the number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns string `i`.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.text[start..end])
    }

    /// Iterates over the strings.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        let mut start = 0;
        self.ends.iter().map(move |&end| &self.text[std::mem::replace(&mut start, end)..end])
    }
}

impl std::fmt::Debug for StrArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<S: AsRef<str>> FromIterator<S> for StrArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StrArray {
        let (mut text, mut ends) = (String::new(), Vec::new());
        for s in strings {
            text.push_str(s.as_ref());
            ends.push(text.len());
        }
        StrArray::from_pushed(text, ends)
    }
}

impl MetadataValue {
    /// The value as text: long arrays by their first few elements and their length.
    pub fn short_text(&self) -> String {
        const SHOWN: usize = 8;
        match self {
            MetadataValue::U8(v) => v.to_string(),
            MetadataValue::I8(v) => v.to_string(),
            MetadataValue::U16(v) => v.to_string(),
            MetadataValue::I16(v) => v.to_string(),
            MetadataValue::U32(v) => v.to_string(),
            MetadataValue::I32(v) => v.to_string(),
            MetadataValue::F32(v) => v.to_string(),
            MetadataValue::Bool(v) => v.to_string(),
            MetadataValue::String(v) => v.to_string(),
            MetadataValue::U64(v) => v.to_string(),
            MetadataValue::I64(v) => v.to_string(),
            MetadataValue::F64(v) => v.to_string(),
            MetadataValue::Array(array) => {
                let first = (0..array.len().min(SHOWN)).filter_map(|i| array.get(i));
                let first: Vec<String> = first.map(|v| v.short_text()).collect();
                let more = array.len() - first.len();
                let more = if more == 0 { String::new() } else { format!(", and {more} more") };
                format!("[{}{more}]", first.join(", "))
            }
        }
    }

    /// Returns the name of the value's type.
    pub fn type_name(&self) -> &'static str {
        match self {
            MetadataValue::U8(_) => "u8",
            MetadataValue::I8(_) => "i8",
            MetadataValue::U16(_) => "u16",
            MetadataValue::I16(_) => "i16",
            MetadataValue::U32(_) => "u32",
            MetadataValue::I32(_) => "i32",
            MetadataValue::F32(_) => "f32",
            MetadataValue::Bool(_) => "bool",
            MetadataValue::String(_) => "string",
            MetadataValue::Array(a) => a.type_name(),
            MetadataValue::U64(_) => "u64",
            MetadataValue::I64(_) => "i64",
            MetadataValue::F64(_) => "f64",
        }
    }

    /// Returns GGUF's number of the value's type.
    pub(crate) fn type_number(&self) -> u32 {
        match self {
            MetadataValue::U8(_) => 0,
            MetadataValue::I8(_) => 1,
            MetadataValue::U16(_) => 2,
            MetadataValue::I16(_) => 3,
            MetadataValue::U32(_) => 4,
            MetadataValue::I32(_) => 5,
            MetadataValue::F32(_) => 6,
            MetadataValue::Bool(_) => 7,
            MetadataValue::String(_) => 8,
            MetadataValue::Array(_) => 9,
            MetadataValue::U64(_) => 10,
            MetadataValue::I64(_) => 11,
            MetadataValue::F64(_) => 12,
        }
    }

    /// Returns an integer of any type.
    pub(crate) fn integer(&self) -> Option<i128> {
        Some(match *self {
            MetadataValue::U8(v) => v.into(),
            MetadataValue::I8(v) => v.into(),
            MetadataValue::U16(v) => v.into(),
            MetadataValue::I16(v) => v.into(),
            MetadataValue::U32(v) => v.into(),
            MetadataValue::I32(v) => v.into(),
            MetadataValue::U64(v) => v.into(),
            MetadataValue::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Returns a number of any type as a float.
    pub(crate) fn float(&self) -> Option<f64> {
        match *self {
            MetadataValue::F32(v) => Some(v.into()),
            MetadataValue::F64(v) => Some(v),
            _ => self.integer().map(|v| v as f64),
        }
    }
}

impl Array {
    /// Returns the name of the array's type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::F32(_) => "array of f32",
            Array::Bool(_) => "array of bool",
            Array::String(_) => "array of strings",
            Array::Array(_) => "array of arrays",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F64(_) => "array of f64",
        }
    }

    /// The number of the element type in the file.
    pub(crate) fn type_number(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::String(_) => 8,
            Array::Array(_) => 9,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Returns whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element number `i`, copied.
    pub fn get(&self, i: usize) -> Option<MetadataValue> {
        Some(match self {
            Array::U8(v) => MetadataValue::U8(*v.get(i)?),
            Array::I8(v) => MetadataValue::I8(*v.get(i)?),
            Array::U16(v) => MetadataValue::U16(*v.get(i)?),
            Array::I16(v) => MetadataValue::I16(*v.get(i)?),
            Array::U32(v) => MetadataValue::U32(*v.get(i)?),
            Array::I32(v) => MetadataValue::I32(*v.get(i)?),
            Array::F32(v) => MetadataValue::F32(*v.get(i)?),
            Array::Bool(v) => MetadataValue::Bool(*v.get(i)?),
            Array::String(v) => MetadataValue::String(v.get(i)?.into()),
            Array::Array(v) => MetadataValue::Array(v.get(i)?.clone()),
            Array::U64(v) => MetadataValue::U64(*v.get(i)?),
            Array::I64(v) => MetadataValue::I64(*v.get(i)?),
            Array::F64(v) => MetadataValue::F64(*v.get(i)?),
        })
    }
}

/// A type that a metadata value can be read as.
///
/// Integers convert between widths when the number fits, integers and floats convert to floats.
pub trait FromValue<'a>: Sized {
    /// What the type is called in messages.
    const EXPECTED: &'static str;

    /// The value as this type.
    fn from_value(value: &'a MetadataValue) -> Result<Self, GgufFault>;
}

fn wrong<T>(expected: &'static str, value: &MetadataValue) -> Result<T, GgufFault> {
    Err(GgufFault::WrongType { expected, found: value.type_name() })
}

fn out_of_range(expected: &'static str, found: i128) -> GgufFault {
    GgufFault::OutOfRange { expected, found: found.to_string() }
}

macro_rules! from_integer {
    ($($t:ty: $name:literal, $array:literal, $same:ident;)*) => {$(
        impl FromValue<'_> for $t {
            const EXPECTED: &'static str = $name;
            fn from_value(value: &MetadataValue) -> Result<$t, GgufFault> {
                let Some(v) = value.integer() else { return wrong($name, value) };
                <$t>::try_from(v).map_err(|_| out_of_range($name, v))
            }
        }
        impl<'a> FromValue<'a> for Cow<'a, [$t]> {
            const EXPECTED: &'static str = $array;
            fn from_value(value: &'a MetadataValue) -> Result<Cow<'a, [$t]>, GgufFault> {
                fn all<T: Copy + Into<i128>>(from: &[T]) -> Result<Vec<$t>, GgufFault> {
                    let one = |&v: &T| <$t>::try_from(v.into()).map_err(|_| out_of_range($array, v.into()));
                    from.iter().map(one).collect()
                }
                #[allow(unreachable_patterns)] // The arm of the same type comes first and borrows.
                Ok(match value {
                    MetadataValue::Array(Array::$same(v)) => Cow::Borrowed(v),
                    MetadataValue::Array(Array::U8(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::I8(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::U16(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::I16(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::U32(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::I32(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::U64(v)) => Cow::Owned(all(v)?),
                    MetadataValue::Array(Array::I64(v)) => Cow::Owned(all(v)?),
                    _ => return wrong($array, value),
                })
            }
        }
    )*};
}

from_integer! {
    u8: "an integer (u8)", "an array of integers (u8)", U8;
    u16: "an integer (u16)", "an array of integers (u16)", U16;
    u32: "an integer (u32)", "an array of integers (u32)", U32;
    u64: "an integer (u64)", "an array of integers (u64)", U64;
    i32: "an integer (i32)", "an array of integers (i32)", I32;
    i64: "an integer (i64)", "an array of integers (i64)", I64;
}

impl FromValue<'_> for usize {
    const EXPECTED: &'static str = "an integer (usize)";
    fn from_value(value: &MetadataValue) -> Result<usize, GgufFault> {
        let Some(v) = value.integer() else {
            return wrong(Self::EXPECTED, value);
        };
        usize::try_from(v).map_err(|_| out_of_range(Self::EXPECTED, v))
    }
}

impl FromValue<'_> for f64 {
    const EXPECTED: &'static str = "a number";
    fn from_value(value: &MetadataValue) -> Result<f64, GgufFault> {
        value.float().map_or_else(|| wrong(Self::EXPECTED, value), Ok)
    }
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a number";
    fn from_value(value: &MetadataValue) -> Result<f32, GgufFault> {
        f64::from_value(value).map(|v| v as f32)
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &MetadataValue) -> Result<bool, GgufFault> {
        if let MetadataValue::Bool(v) = value { Ok(*v) } else { wrong(Self::EXPECTED, value) }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a MetadataValue) -> Result<&'a str, GgufFault> {
        if let MetadataValue::String(v) = value { Ok(v) } else { wrong(Self::EXPECTED, value) }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const EXPECTED: &'static str = "an array";
    fn from_value(value: &'a MetadataValue) -> Result<&'a Array, GgufFault> {
        if let MetadataValue::Array(v) = value { Ok(v) } else { wrong(Self::EXPECTED, value) }
    }
}

impl<'a> FromValue<'a> for &'a StrArray {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a MetadataValue) -> Result<&'a StrArray, GgufFault> {
        if let MetadataValue::Array(Array::String(v)) = value { Ok(v) } else { wrong(Self::EXPECTED, value) }
    }
}

impl<'a> FromValue<'a> for &'a [bool] {
    const EXPECTED: &'static str = "an array of bools";
    fn from_value(value: &'a MetadataValue) -> Result<&'a [bool], GgufFault> {
        if let MetadataValue::Array(Array::Bool(v)) = value { Ok(v) } else { wrong(Self::EXPECTED, value) }
    }
}

impl<'a> FromValue<'a> for Cow<'a, [f32]> {
    const EXPECTED: &'static str = "an array of floats";
    fn from_value(value: &'a MetadataValue) -> Result<Cow<'a, [f32]>, GgufFault> {
        match value {
            MetadataValue::Array(Array::F32(v)) => Ok(Cow::Borrowed(v)),
            MetadataValue::Array(Array::F64(v)) => Ok(v.iter().map(|&v| v as f32).collect()),
            _ => wrong(Self::EXPECTED, value),
        }
    }
}

macro_rules! into_value {
    ($($t:ty: $variant:ident;)*) => {$(
        impl From<$t> for MetadataValue {
            fn from(v: $t) -> MetadataValue {
                MetadataValue::$variant(v.into())
            }
        }
    )*};
}

into_value! {
    u8: U8; i8: I8; u16: U16; i16: I16; u32: U32; i32: I32; u64: U64; i64: I64;
    f32: F32; f64: F64; bool: Bool; &str: String; String: String; Array: Array;
}

impl From<StrArray> for MetadataValue {
    fn from(v: StrArray) -> MetadataValue {
        MetadataValue::Array(Array::String(v))
    }
}

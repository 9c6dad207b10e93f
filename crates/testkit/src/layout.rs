//! The layout of types that one version of a program writes and another version reads. A test compares the
//! hash of the layout with the hash that was recorded for the version number of the format.
//!
//! The types are deserialized from nothing: each request for a value is recorded and answered with a small
//! value. Each pass sees other variants of the enumerations; after a fixed number of passes each variant must
//! have been seen.

use core::fmt::{self, Display};
use serde::de::value::U32Deserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, IntoDeserializer, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};
use std::collections::{BTreeMap, BTreeSet};

/// The value of a field of bytes. It is as long as the largest type that expects a fixed number of bytes.
const BYTES: [u8; 2048] = [0; 2048];

/// Number of passes.
const PASSES: usize = 2000;

/// Returns the layout of a type: the names of all types that it contains, each with its fields and their
/// types, or its variants, in order.
///
/// # Panics
/// If a type refuses small values, or a variant was never seen.
pub fn layout_of<T: DeserializeOwned>() -> BTreeMap<String, BTreeSet<String>> {
    let mut layout = Layout::default();
    for _ in 0..PASSES {
        let traced = T::deserialize(Trace { layout: &mut layout, out: &mut String::new() });
        traced.map(drop).unwrap_or_else(|error| panic!("a type refuses small values: {error}"));
    }
    for (name, (picks, variants)) in &layout.enums {
        assert!(picks >= variants, "{name} has {variants} variants, of which {picks} were seen");
    }
    layout.types
}

/// Returns a hash of the layout of a type (FNV-1a), which differs if one version cannot read what the other
/// one writes.
///
/// # Panics
/// As [`layout_of`].
pub fn layout_hash<T: DeserializeOwned>() -> u64 {
    let text = format!("{:?}", layout_of::<T>());
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[derive(Default)]
struct Layout {
    types: BTreeMap<String, BTreeSet<String>>,
    /// How often a variant of each enumeration was picked, and the number of its variants.
    enums: BTreeMap<&'static str, (usize, usize)>,
}

/// Records one value.
struct Trace<'a> {
    layout: &'a mut Layout,
    /// The description of the value.
    out: &'a mut String,
}

/// A type has refused a value.
#[derive(Debug)]
struct Refused(String);

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl Error for Refused {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

/// Values of a sequence, a tuple, a struct or a map.
struct Elements<'a> {
    layout: &'a mut Layout,
    /// Names of the fields; empty for values without names.
    fields: &'static [&'static str],
    count: usize,
    left: usize,
    out: String,
}

impl Elements<'_> {
    fn next<'de, S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Refused> {
        let index = self.count - self.left;
        self.left = self.left.saturating_sub(1);
        let mut out = String::new();
        let value = seed.deserialize(Trace { layout: self.layout, out: &mut out })?;
        let name = self.fields.get(index).copied().unwrap_or("");
        self.out += &format!("{name}:{out},");
        Ok(value)
    }
}

impl<'de> SeqAccess<'de> for &mut Elements<'_> {
    type Error = Refused;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        if self.left == 0 { Ok(None) } else { self.next(seed).map(Some) }
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for &mut Elements<'_> {
    type Error = Refused;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        if self.left == 0 { Ok(None) } else { self.next(seed).map(Some) }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Refused> {
        self.next(seed)
    }
}

impl<'a> Trace<'a> {
    /// Gives `count` values to a visitor, and returns the visitor's value and the description of the values.
    fn elements<R>(
        self,
        fields: &'static [&'static str],
        count: usize,
        visit: impl FnOnce(&mut Elements<'_>) -> Result<R, Refused>,
    ) -> Result<(R, String), Refused> {
        let mut elements = Elements { layout: self.layout, fields, count, left: count, out: String::new() };
        let value = visit(&mut elements)?;
        Ok((value, elements.out))
    }

    /// As [`Trace::elements`], for the type `name`.
    fn named<R>(
        self,
        name: &str,
        fields: &'static [&'static str],
        count: usize,
        visit: impl FnOnce(&mut Elements<'_>) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        self.out.push_str(name);
        let Trace { layout, out } = self;
        let (value, content) = Trace { layout, out }.elements(fields, count, visit)?;
        layout.types.entry(name.into()).or_default().insert(content);
        Ok(value)
    }
}

macro_rules! simple {
    ($($method:ident $visit:ident $value:expr,)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
            self.out.push_str(stringify!($method).trim_start_matches("deserialize_"));
            visitor.$visit($value)
        })*
    };
}

impl<'de> Deserializer<'de> for Trace<'_> {
    type Error = Refused;

    simple! {
        deserialize_bool visit_bool false,
        deserialize_i8 visit_i8 0,
        deserialize_i16 visit_i16 0,
        deserialize_i32 visit_i32 0,
        deserialize_i64 visit_i64 0,
        deserialize_i128 visit_i128 0,
        deserialize_u8 visit_u8 0,
        deserialize_u16 visit_u16 0,
        deserialize_u32 visit_u32 0,
        deserialize_u64 visit_u64 0,
        deserialize_u128 visit_u128 0,
        deserialize_f32 visit_f32 0.0,
        deserialize_f64 visit_f64 0.0,
        deserialize_char visit_char 'a',
        deserialize_str visit_str "",
        deserialize_string visit_str "",
        deserialize_bytes visit_bytes &BYTES,
        deserialize_byte_buf visit_bytes &BYTES,
    }

    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_unit()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.out.push('?');
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        let Trace { layout, out } = self;
        let trace = Trace { layout, out: &mut String::new() };
        let (value, content) = trace.elements(&[], 1, |elements| visitor.visit_seq(elements))?;
        out.push_str(&format!("[{content}]"));
        Ok(value)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Refused> {
        let Trace { layout, out } = self;
        let trace = Trace { layout, out: &mut String::new() };
        let (value, content) = trace.elements(&[], len, |elements| visitor.visit_seq(elements))?;
        out.push_str(&format!("({content})"));
        Ok(value)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        let Trace { layout, out } = self;
        let trace = Trace { layout, out: &mut String::new() };
        let (value, content) = trace.elements(&[], 1, |elements| visitor.visit_map(elements))?;
        out.push_str(&format!("{{{content}}}"));
        Ok(value)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.named(name, &[], 0, |_| visitor.visit_unit())
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.named(name, &[], 1, |elements| visitor.visit_seq(elements))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.named(name, &[], len, |elements| visitor.visit_seq(elements))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.named(name, fields, fields.len(), |elements| visitor.visit_seq(elements))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.out.push_str(name);
        let Trace { layout, .. } = self;
        let (picks, _) = layout.enums.entry(name).or_insert((0, variants.len()));
        let index = *picks % variants.len();
        *picks += 1;
        let qualified = format!("{name}::{index}:{}", variants[index]);
        layout.types.entry(qualified.clone()).or_default();
        // Cannot truncate: there are few variants.
        visitor.visit_enum(Variant { layout, name: qualified, index: index as u32 })
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Refused> {
        Err(Refused("values have no names".into()))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_unit()
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Refused> {
        Err(Refused("the encoding does not describe itself".into()))
    }
}

/// A variant of an enumeration.
struct Variant<'a> {
    layout: &'a mut Layout,
    name: String,
    index: u32,
}

impl<'de> EnumAccess<'de> for Variant<'_> {
    type Error = Refused;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Refused> {
        let index: U32Deserializer<Refused> = self.index.into_deserializer();
        Ok((seed.deserialize(index)?, self))
    }
}

impl Variant<'_> {
    fn fields<R>(
        self,
        fields: &'static [&'static str],
        count: usize,
        visit: impl FnOnce(&mut Elements<'_>) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        let trace = Trace { layout: self.layout, out: &mut String::new() };
        trace.named(&self.name, fields, count, visit)
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Refused;

    fn unit_variant(self) -> Result<(), Refused> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Refused> {
        self.fields(&[], 1, |elements| elements.next(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Refused> {
        self.fields(&[], len, |elements| visitor.visit_seq(elements))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.fields(fields, fields.len(), |elements| visitor.visit_seq(elements))
    }
}

#[cfg(test)]
mod tests {
    use super::{layout_hash, layout_of};
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    struct Outer {
        many: Vec<Kind>,
        other: Option<Box<Kind>>,
    }

    #[derive(Serialize, Deserialize)]
    enum Kind {
        Nothing,
        Two(u8, u16),
        Inner { deep: Deep },
    }

    #[derive(Serialize, Deserialize)]
    enum Deep {
        A,
        B(core::net::IpAddr),
    }

    #[test]
    fn layout_has_all_types_with_their_fields() {
        let layout = layout_of::<Outer>();
        let content = |name: &str| layout[name].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(content("Outer"), ["many:[:Kind,],other:?Kind,"]);
        assert_eq!(content("Kind::1:Two"), [":u8,:u16,"]);
        assert_eq!(content("Kind::2:Inner"), ["deep:Deep,"]);
        assert_eq!(content("Deep::1:B"), [":IpAddr,"]);
        assert!(layout.contains_key("Kind::0:Nothing") && layout.contains_key("IpAddr::1:V6"));
        assert_ne!(layout_hash::<Outer>(), layout_hash::<Kind>());
    }
}

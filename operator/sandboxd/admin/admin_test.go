package admin

import (
	"crypto/ed25519"
	"encoding/base64"
	"strings"
	"testing"
)

var private = ed25519.NewKeyFromSeed([]byte(strings.Repeat("s", ed25519.SeedSize)))

func public() string {
	return base64.StdEncoding.EncodeToString(private.Public().(ed25519.PublicKey))
}

func sign(message string) string {
	return base64.RawURLEncoding.EncodeToString(ed25519.Sign(private, []byte(message)))
}

func TestSignatureOpensOneMemberInOneBoot(t *testing.T) {
	door, err := ByKey(public(), "pool-1a2b-0", "b1")
	if err != nil {
		t.Fatal(err)
	}
	good := sign("agentfly-admin:pool-1a2b-0:b1")
	for range 2 { // verified, then compared
		if !door.Opens(good) || !door.Opens(good+"==") {
			t.Fatal("the owner is refused")
		}
	}
	for name, token := range map[string]string{
		"another member": sign("agentfly-admin:pool-1a2b-1:b1"),
		"another boot":   sign("agentfly-admin:pool-1a2b-0:b2"),
		"no prefix":      sign("pool-1a2b-0:b1"),
		"nothing":        "",
		"no signature":   "AAAA",
		"no base64":      "!",
		"cut":            good[:len(good)-1],
	} {
		if door.Opens(token) {
			t.Errorf("%s opens", name)
		}
	}
}

func TestKnownTokenIsComparedAndNoOtherOpens(t *testing.T) {
	door := ByToken("admin")
	if !door.Opens("admin") || door.Opens("") || door.Opens("other") {
		t.Error("comparison")
	}
	if new(Door).Opens("") {
		t.Error("no token opens")
	}
}

func TestBadKeyOrNameIsRefusedByField(t *testing.T) {
	for want, given := range map[string][3]string{
		"adminKey: ":             {"?", "m", "b"},
		"adminKey: has 3 bytes":  {"AAAA", "m", "b"},
		`member: "" is empty`:    {public(), "", "b"},
		`member: "a:b" is empty`: {public(), "a:b", "b"},
		"boot: is empty":         {public(), "m", ""},
	} {
		if _, err := ByKey(given[0], given[1], given[2]); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

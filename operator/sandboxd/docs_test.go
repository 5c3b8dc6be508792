package main

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

func TestEveryRouteIsDocumentedAndNoOther(t *testing.T) {
	page, err := os.ReadFile("../../docs/sandboxd.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented, served []string
	for _, found := range regexp.MustCompile("(?m)^\\| `([A-Z]+ [^?` ]+)").FindAllSubmatch(page, -1) {
		documented = append(documented, string(found[1]))
	}
	for _, route := range routes {
		served = append(served, route.method+" "+route.path)
	}
	slices.Sort(documented)
	slices.Sort(served)
	if !slices.Equal(documented, served) {
		t.Errorf("%v, served are %v", documented, served)
	}
}
